"""A tokenizer with a chat template, tiny models that have it, and conversations in files."""

import json
import random

from command_line import mtcli

MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# With what published templates use: loop controls, namespaces, tojson, tools, own words for errors.
BUSY = """{{ bos_token }}
{%- set seen = namespace(first=true) %}
{%- if tools %}
    {{- 'Tools: ' + tools | tojson(indent=2) }}
{%- endif %}
{% for m in messages %}
    {%- if m.role == 'tool' %}{% continue %}{% endif %}
    {%- if m.role == 'system' and not loop.first %}
        {{- raise_exception('the system speaks first') }}
    {%- endif %}
    {%- if m.role == 'assistant' %}
        {{- '[A]' }}{% generation %}{{ m.content | trim }}{{ eos_token }}{% endgeneration %}
    {%- else %}
        {{- '[' + m.role[0] | upper + ']' + m.content }}
    {%- endif %}
    {%- set seen.first = false %}
{% endfor %}
{%- if add_generation_prompt %}{{ '[A]' }}{% endif %}
{{- strftime_now('') }}"""

# Short ones that show a turn otherwise once others follow it, in the shapes of published ones.
REWRITING = {
    # Reasoning, an empty one too, is shown behind the last user's message alone.
    "Qwen3": """{% set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and loop.index0 > ns.last %}
        {{- '<|im_start|>assistant\n<think>\n' + (m.reasoning_content or '') }}
        {{- '\n</think>\n\n' + m.content + '<|im_end|>\n' }}
    {%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}""",
    # Every rendering that ends with a turn ends with a token.
    "Phi-3": """{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}
{%- else %}{{ eos_token }}{% endif %}""",
    # The last turn alone has its analysis, and ends with another token.
    "gpt-oss": """{% for m in messages %}
    {%- if m.role != 'assistant' %}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- elif loop.last and not add_generation_prompt %}
        {%- if 'thinking' in m %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
    {%- else %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}""",
    # Tools stand before the last user's message, the system's prompt in it if nothing follows.
    "Mistral v0.3": """{% set system = messages[0].content if messages[0].role == 'system' %}
{%- set turns = messages[1:] if system else messages %}
{%- set users = turns | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for m in turns %}
    {%- if m.role == 'user' %}
        {%- if tools and m == users[-1] %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + (system + '\n\n' if loop.last and system else '') + m.content + '[/INST]' }}
    {%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + eos_token }}
    {%- else %}{{- raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{%- endfor %}""",
    # The prompt opens a reasoning, which no turn has.
    "DeepSeek-R1": """{{ bos_token }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|Assistant|>' + m.content.split('</think>')[-1] + '<|end|>' }}
    {%- else %}{{- '<|User|>' + m.content if m.role == 'user' else m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\n' }}{% endif %}""",
    # The prompt has an empty thought, which no turn has.
    "Gemma 4": """{{ bos_token }}
{%- for m in messages %}
    {{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
    {{- m.content | trim + '<turn|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|turn>model\n<|channel>thought\n<channel|>' }}{% endif %}""",
}


def tokenizer(template=MARKED):
    """transformers' tokenizer of bytes, with the special tokens of ChatML."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    specials = {"eos_token": "<|im_end|>", "bos_token": "<s>"}
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **specials)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    made.chat_template = template
    return made


def sums(count, seed=0):
    """Lines of prompts and completions of different lengths."""
    draw = random.Random(seed)
    for _ in range(count):
        a, b = draw.randrange(10 ** draw.randrange(1, 5)), draw.randrange(100)
        yield {"prompt": f"{a} plus {b}?", "completion": f"It is {a + b}."}


def talks(count, seed=0):
    """Lines of messages with one or two turns of the assistant."""
    for number, line in enumerate(sums(count, seed)):
        messages = [
            {"role": "user", "content": line["prompt"]},
            {"role": "assistant", "content": line["completion"]},
        ]
        if number % 3 == 0:
            messages.insert(0, {"role": "system", "content": "Be brief, 日本 🙂."})
        if number % 2:
            messages.append({"role": "user", "content": "Sure?"})
            messages.append({"role": "assistant", "content": "Yes."})
        yield {"messages": messages}


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return path


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = EXPERTS | {"num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8}
LATENT |= {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10}
LATENT |= {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
GROUPS = {"n_group": 2, "topk_group": 1}
FURTHER = {  # further models, by kind: transformers' config, and sizes of its own
    "starcoder2": ("Starcoder2Config", {}),
    "phi3": ("Phi3Config", {"pad_token_id": None}),
    "glm4": ("Glm4Config", {"pad_token_id": None, "head_dim": 8}),
    "falcon": ("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        EXPERTS | {"num_experts": 4, "head_dim": 8, "mlp_only_layers": [0]},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 9},
    ),
    "deepseek_v3": ("DeepseekV3Config", LATENT | GROUPS),
    "deepseek_v2": ("DeepseekV2Config", LATENT | {"q_lora_rank": None, "topk_method": "greedy"}),
    "glm4_moe": (
        "Glm4MoeConfig",
        EXPERTS
        | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
        | {"head_dim": 8},
    ),
}


def save_model(folder, kind="llama", template=MARKED, **sizes):
    """Saves a tiny model and the tokenizer as transformers does; returns the model."""
    import torch
    import transformers as t

    made = tokenizer(template)
    ids = {"eos_token_id": made.eos_token_id, "bos_token_id": made.bos_token_id}
    shape = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    if kind == "gpt2":
        still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        shape = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
        config = t.GPT2Config(**(shape | sizes), **ids, **still, initializer_range=0.2)
    elif kind == "gpt_neox":
        shape.pop("num_key_value_heads")
        config = t.GPTNeoXConfig(**(shape | sizes), **ids)
    elif kind == "mixtral":
        config = t.MixtralConfig(**(shape | {"num_local_experts": 4} | sizes), **ids)
    elif kind == "qwen2_moe":
        experts = {"num_experts": 4, "moe_intermediate_size": 16}
        experts |= {"shared_expert_intermediate_size": 24, "num_experts_per_tok": 2}
        experts["mlp_only_layers"] = [0]
        config = t.Qwen2MoeConfig(**(shape | experts | sizes), **ids)
    elif kind == "gemma2":
        caps = {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 4.0}
        config = t.Gemma2Config(
            **(shape | caps | {"head_dim": 8, "sliding_window": 9} | sizes), **ids
        )
    elif kind in FURTHER:
        name, more = FURTHER[kind]
        config = getattr(t, name)(**(shape | more | sizes), **ids)
    else:
        assert kind == "llama", kind
        config = t.LlamaConfig(**(shape | sizes), **ids)
    model = t.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = [ids["eos_token_id"], 5]
    model.save_pretrained(folder)
    made.save_pretrained(folder)
    return model


def fine_tune(home, *words, **settings):
    """`mtcli train` in a folder, by settings over those of short conversations."""
    settings = {"batch.seq_len": 128, "batch.global_batch_size": 4} | settings
    sets = [word for item in settings.items() for word in ("--set", "{}={}".format(*item))]
    return mtcli("train", *words, *sets, folder=home)
