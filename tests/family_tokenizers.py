"""Small tokenizers of the kinds that families publish, each with a short chat template that does
what its family's does."""

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXT = (
    "The capital of France is Paris.\n\ndef add(a, b):\n    return a + b  # 12345\n"
    "Ünïcode is 日本 and 🙂. It's what they've said, isn't it?\n"
)
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
WORDS += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
SPACES = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
STRIPPED = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""

MISTRAL = """{%- set today = strftime_now("%Y-%m-%d") %}
{%- set default_system_message = "You are Mistral. The current date is " + today + "." %}
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = default_system_message %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- '[SYSTEM_PROMPT]' + system_message + '[/SYSTEM_PROMPT]' }}
{%- for message in loop_messages %}
    {%- if message['role'] == 'user' %}
        {%- if message['content'] is string %}
            {{- '[INST]' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST]' }}{%- for block in message['content'] %}{{- block['text'] }}{%- endfor %}
            {{- '[/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {%- if message['content'] is string %}{{- message['content'] + eos_token }}
        {%- else %}{{- message['content'][0]['text'] + eos_token }}{%- endif %}
    {%- else %}
        {{- raise_exception('Only user, system and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}"""

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- "# Tools\n\n<tools>" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
           and not message.content.startswith('<tool_response>') %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}
    {%- else %}{%- set content = '' %}{%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\n') %}
            {%- set reasoning_content = reasoning_content.split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') }}
            {{- '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}{{- '<|im_start|>' + message.role + '\n' + content }}{%- endif %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""

HARMONY = """{%- macro render_type(spec) -%}
    {%- if spec.type == "array" -%}{{- render_type(spec['items']) + "[]" }}
    {%- elif spec.type == "string" -%}{{- "string" }}
    {%- else -%}{{- "any" }}{%- endif -%}
{%- endmacro -%}
{%- macro build_system_message() -%}
    {%- if model_identity is not defined %}
        {%- set model_identity = "You are a model." %}
    {%- endif %}
    {{- model_identity + "\nCurrent date: " + strftime_now("%Y-%m-%d") + "\n\n" }}
    {%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
    {{- "Reasoning: " + reasoning_effort + "\n\n# Valid channels: analysis, commentary, final." }}
{%- endmacro -%}
{{- "<|start|>system<|message|>" }}{{- build_system_message() }}{{- "<|end|>" }}
{%- if messages[0].role in ["developer", "system"] %}
    {%- set developer_message = messages[0].content %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set developer_message = "" %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if developer_message or tools %}
    {{- "<|start|>developer<|message|>" }}
    {%- if developer_message %}{{- "# Instructions\n\n" + developer_message + "\n\n" }}{%- endif %}
    {%- if tools -%}
        {{- "# Tools\n\n" }}
        {%- for tool in tools %}
            {%- set tool = tool.function %}
            {{- "type " + tool.name + " = (_: " }}
            {%- for name, spec in tool.parameters.properties.items() %}
                {{- name + ": " + render_type(spec) + ", " }}
            {%- endfor %}{{- ") => any;\n" }}
        {%- endfor %}
    {%- endif -%}
    {{- "<|end|>" }}
{%- endif %}
{%- for message in loop_messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if loop.last and not add_generation_prompt %}
            {%- if "thinking" in message %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" }}
                {{- message.thinking + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
        {%- endif %}
    {%- elif message.role == 'user' -%}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""

DEEPSEEK = """{% if not add_generation_prompt is defined %}
{%- set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(is_first=false, system_prompt='') %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
{%- set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}
{{- bos_token }}{{ ns.system_prompt }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '<｜User｜>' + message['content'] }}{%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] is not none %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
        {{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""


def byte_level(words=WORDS):
    """Bytes within words, as Qwen, gpt-oss, DeepSeek and Mistral's Tekken have them."""
    parts = [
        pre_tokenizers.Split(Regex(words), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    return {"pre_tokenizer": pre_tokenizers.Sequence(parts), "decoder": decoders.ByteLevel()}


REPLACED = normalizers.Replace(" ", "▁")
PREPENDED = normalizers.Sequence([normalizers.Prepend("▁"), REPLACED])
FIRST = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
QWENS, OSS = ["<|im_start|>", "<|im_end|>"], ["<|start|>", "<|message|>", "<|channel|>", "<|end|>"]
INST = ["[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]
SPEAKERS = ["<｜User｜>", "<｜Assistant｜>"]
TURNS = ["<start_of_turn>", "<end_of_turn>", "<start_of_image>"]

# By name: the backend's parts, bos and eos, more special tokens, and the template.
KINDS = {
    "gemma": (
        {
            "normalizer": REPLACED,
            "pre_tokenizer": pre_tokenizers.Split(" ", "merged_with_previous"),
            "decoder": SPACES,
        },
        ("<bos>", "<eos>"), TURNS, GEMMA,
    ),
    "mistral v0.1": (
        {"normalizer": PREPENDED, "decoder": STRIPPED}, ("<s>", "</s>"), INST, MISTRAL,
    ),
    "mistral v0.3": (
        {"pre_tokenizer": FIRST, "decoder": STRIPPED}, ("<s>", "</s>"), INST, MISTRAL,
    ),
    "mistral tekken": (byte_level(), ("<s>", "</s>"), INST, MISTRAL),
    "qwen": (
        byte_level() | {"normalizer": normalizers.NFC()}, (None, "<|im_end|>"),
        ["<|endoftext|>", *QWENS], QWEN,
    ),
    "gpt-oss": (byte_level(), ("<|startoftext|>", "<|return|>"), OSS, HARMONY),
    "deepseek": (
        byte_level(), ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"), SPEAKERS, DEEPSEEK,
    ),
}  # fmt: skip


def make(folder, kind):
    """transformers' tokenizer of a kind, saved in a folder."""
    from transformers import PreTrainedTokenizerFast

    parts, (bos, eos), more, template = KINDS[kind]
    is_bytes = isinstance(parts["decoder"], decoders.ByteLevel)
    specials = [name for name in ("<unk>", bos, eos, *more) if name]
    if is_bytes:
        backend, letters = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
        backend.pre_tokenizer = parts["pre_tokenizer"]
        trainer = trainers.BpeTrainer(vocab_size=380, initial_alphabet=letters, show_progress=False)
        backend.train_from_iterator([TEXT], trainer)
    else:  # merges of letters, and bytes for all others, as SentencePiece's models have
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.BpeTrainer(vocab_size=100, show_progress=False)
        backend.train_from_iterator([TEXT.replace("日本", "").replace("🙂", "")], trainer)
        backend = with_bytes(backend)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if part in parts:
            setattr(backend, part, parts[part])
    backend.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in specials])
    if bos:
        named = [(bos, backend.token_to_id(bos))]
        single = f"{bos}:0 $A:0"
        backend.post_processor = processors.TemplateProcessing(
            single=single, pair=f"{single} $B:1", special_tokens=named
        )
    roles = {"bos_token": bos, "eos_token": eos, "unk_token": None if is_bytes else "<unk>"}
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, **roles)
    theirs.chat_template = template
    theirs.save_pretrained(folder)
    return theirs


def with_bytes(trained):
    """A tokenizer with the merges of a trained one, and a token for each byte that no letter is."""
    import json

    model = json.loads(trained.to_str())["model"]
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    vocab = {name: number for number, name in enumerate(dict.fromkeys(names))}
    merges = [tuple(pair) for pair in model["merges"]]
    options = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    return Tokenizer(models.BPE(vocab, merges, **options))
