"""The cross-field rules: each says both numbers, a way out, and where; all speak at once."""

import pytest

from mtcli.core.config.errors import Exit, MtcliError
from mtcli.core.config.fields import divisors, listing
from mtcli.core.config.layout_rules import data_parallel_size
from mtcli.core.config.loading import config_of, load_config
from mtcli.core.config.rules import RULES, load_checked, problems, require

LLAMA = ("model.architecture=llama", "model.num_heads=12", "model.ffn_hidden_size=96")
GPT = ("model.num_layers=12", "model.num_heads=8", "model.num_kv_heads=8", "model.head_dim=32")
MOE = ("model.num_experts=8", "model.top_k=2", "model.moe_ffn_hidden_size=96")
MLA = ("model.mla.kv_rank=64", "model.head_dim=192", "model.position=rope")
LSGD = ("sync.method=lsgd", "optimizer.name=sgd")
SGD = ("optimizer.name=sgd", "optimizer.momentum=0.9")
# fmt: off
BROKEN = {  # rule: (overrides of tiny, world, field, message, hint)
    "_tensors_can_be_counted": (
        ["model.hidden_size=100000000"], 1, "model",
        "ffn_hidden_size * hidden_size: 8e+16 elements, of 1e+15 at most",
        "smaller layers"),
    "_narrow_moments_move": (
        ["train.precision=fp64", "train.moments=bf16"], 1, "train.moments",
        "moments='bf16' with precision='fp64', whose sums are as exact",
        "'fp32', or another train.precision"),
    "_narrow_gradients_are_sums": (
        ["train.gradients=bf16", "train.precision=bf16", "sync.method=onebit",
         "sync.replicas=2"], 2, "train.gradients",
        "gradients='bf16' with sync.method='onebit', which sums them in float32",
        "'fp32', or another sync.method"),
    "_narrow_sums_add_up": (
        ["train.precision=bf16", "train.gradients=bf16", "batch.micro_batch_size=1",
         "batch.global_batch_size=514"], 2, "train.gradients",
        "gradients='bf16' of 257 micro-batches, and a sum in bfloat16 rounds off what is less than "
        "1/256 of it", "at most 256 micro-batches of a rank, or gradients='fp32'"),
    "_heads": (
        ["model.num_kv_heads=3"], 1, "model.num_kv_heads",
        "num_kv_heads=3 does not divide num_heads=8", "1, 2, 4 or 8"),
    "_experts_are_whole": (
        ["model.num_experts=4", "model.top_k=5"], 1, "model.top_k",
        "top_k=5 of num_experts=4 experts", "1 to 4"),
    "experts_see_tokens_once": (
        [*MOE, "parallel.tp=2", "parallel.sequence_parallel=false"], 2,
        "parallel.sequence_parallel",
        "with tp=2 and sequence_parallel=false experts would see tokens 2 times",
        "parallel.sequence_parallel = true, or parallel.tp = 1"),
    "_world_divides": (
        ["parallel.tp=2", "parallel.pp=2"], 6, "parallel",
        "tp*cp*pp = 2*1*2 = 4 does not divide the world of 6 ranks",
        "run 4 or 8 ranks (--nproc), or choose tp*cp*pp among 1, 2, 3 or 6; for 1: "
        "--set parallel.tp=1 --set parallel.pp=1"),
    "validation_sets_have_names": (
        ["data.valid.a/b=x"], 1, "data.valid", "a validation set is called 'a/b'",
        "letters, digits, - and _, such as wiki"),
    "validation_is_computed": (
        ["train.keep_best=1", 'data.train=["a"]'], 1, "train.keep_best",
        "keep_best=1 with eval_every=0: there is no validation loss",
        "train.eval_every of 1 or more, or keep_best = 0"),
    "subsets_are_of_sequences": (
        ["data.reselect_every=10"], 1, "data.reselect_every",
        "reselect_every=10 with no data.subset, which says how many to choose",
        "data.subset = a file of `mtcli select` of token data, or reselect_every = 0"),
    "_experts_fit": (
        [*MOE, "parallel.ep=8"], 12, "parallel.ep",
        "ep*etp*pp = 8*1*1 does not divide the world of 12 ranks",
        "choose ep*etp among 1, 2, 3, 4, 6 or 12"),
    "_tensor_parallel_divides": (
        ["parallel.tp=3"], 3, "parallel.tp",
        "tp=3 does not divide num_kv_heads=8", "1, 2, 4 or 8"),
    "_grid_divides": (
        ["parallel.tp_mode=2d", "parallel.tp=9"], 9, "parallel.tp",
        "tp_mode='2d' of 3 x 3 ranks has 3 rows, which do not divide hidden_size=256",
        "rows 1, 2, 4, 8, 16, 32, 64 or 128: panels of hidden columns are not padded"),
    "_grid_holds_whole_sequences": (
        ["parallel.tp_mode=2d", "parallel.tp=4", "parallel.cp=2"], 8, "parallel.cp",
        "tp_mode='2d' of 2 x 2 ranks with cp=2: its rows hold whole sequences, and attention runs "
        "in each by itself", "parallel.cp = 1, or tp_mode '1d'"),
    "_grid_multiplies_whole_panels": (
        ["parallel.tp_mode=2d", "parallel.tp=4", "train.precision=fp8"], 4, "train.precision",
        "precision='fp8' with tp_mode='2d' of 2 x 2 ranks: scales are of a layer's operands, and "
        "it multiplies panels of them", "train.precision = 'bf16', or tp_mode '1d'"),
    "grids_shard_tokens": (
        ["parallel.tp_mode=2d", "parallel.tp=4", "parallel.sequence_parallel=false"], 4,
        "parallel.sequence_parallel",
        "sequence_parallel=false with tp_mode='2d' of 2 x 2 ranks: between layers its ranks always "
        "hold other sequences and columns, and none replicates activations",
        "parallel.sequence_parallel = true, or tp_mode = '1d'"),
    "rows_share_micro_batches": (
        ["parallel.tp_mode=2d", "parallel.tp=4", "batch.micro_batch_size=3"], 4,
        "batch.micro_batch_size",
        "tp_mode='2d' of 2 x 2 ranks has 2 rows, which do not divide micro_batch_size=3: each row "
        "holds other sequences of it", "micro_batch_size 2 or 4"),
    "_sequence_divides": (
        ["parallel.tp=8", "batch.micro_batch_size=1", "batch.seq_len=12"], 8, "parallel.tp",
        "tp=8 does not divide the tokens of a micro-batch=12",
        "1, 2, 3, 4, 6 or 12, or parallel.sequence_parallel = false"),
    "context_divides": (
        ["parallel.cp=2", "batch.seq_len=250"], 2, "parallel.cp",
        "2*cp=4 does not divide seq_len=250: each rank holds two chunks", "seq_len 248 or 252"),
    "_layers_fill_stages": (
        ["parallel.pp=5"], 5, "parallel.pp",
        "pp*vpp=5*1=5 does not divide num_layers=12",
        "choose pp*vpp among 1, 2, 3, 4, 6 or 12, or set parallel.stage_layers"),
    "_sharding_fits": (
        ["parallel.zero=3", "parallel.pp=2", "parallel.schedule=zero_bubble"], 4, "parallel.zero",
        "zero=3 with schedule='zero_bubble': FSDP2 reduces gradients where a backward ends, "
        "and zero_bubble computes those of weights later",
        "schedule '1f1b', 'interleaved' or 'gpipe', or zero 0 or 1"),
    "_schedule_fits": (
        ["parallel.pp=2", "parallel.vpp=2"], 2, "parallel.schedule",
        "vpp=2 with schedule='1f1b'",
        "vpp > 1 takes schedule = 'interleaved', and the other schedules take vpp = 1"),
    "_batch_divides": (
        ["batch.micro_batch_size=3", "batch.global_batch_size=16"], 2, "batch.global_batch_size",
        "micro_batch_size*dp = 3*2 = 6 does not divide global_batch_size=16",
        "global_batch_size 12 or 18"),
    "workers_can_be_pulled": (
        [*LSGD, "sync.group_size=3"], 4, "sync.group_size",
        "group_size=3 does not divide the 4 replicas", "1, 2 or 4"),
    "workers_decide_alone": (
        [*LSGD, "sync.asynchronous=true", "train.precision=fp16"], 4, "sync.asynchronous",
        "asynchronous=true: between exchanges a worker asks no other, and a dynamic loss scale is "
        "that of all", "a fixed train.loss_scale, or bf16"),
    "_sequence_fits": (
        ["batch.seq_len=512"], 1, "batch.seq_len",
        "seq_len=512 exceeds the learned positions, max_seq_len=256",
        "batch.seq_len of at most 256"),
    "_curve_fits": (
        ["optimizer.lr=1e-4", "optimizer.min_lr=1e-3"], 1, "optimizer.min_lr",
        "min_lr=0.001 is above lr=0.0001", "0 to 0.0001"),
    "_run_has_a_length": (
        ["train.epochs=0"], 1, "train.epochs",
        "epochs=0: the run has no length", "more epochs, such as 1, or train.steps"),
    "_trust_bounds_are_a_range": (
        ["optimizer.name=lamb", "optimizer.trust_bounds=[0.3, 0.01]"], 1, "optimizer.trust_bounds",
        "the least trust ratio 0.3 is above the largest 0.01", "[0.01, 0.3]"),
    "fields_are_used": (
        ["optimizer.trust_bounds=[0.01, 0.3]"], 1, "optimizer.trust_bounds",
        "trust_bounds=[0.01, 0.3] with name='adamw', which has no trust ratio",
        "optimizer.name = 'lamb', or leave optimizer.trust_bounds out"),
    "neighbours_are_mixed": (
        [*SGD, "sync.method=decentlam", "sync.topology=one_peer_exponential"], 4, "sync.topology",
        "topology='one_peer_exponential' of 4 replicas has a mixing matrix that is not symmetric, "
        "with which decentlam's momentum is of no gradient",
        "sync.topology = 'symmetric_exponential', or sync.method = 'dmsgd'"),
    "next_tokens_are_hidden": (
        ["model.causal=false"], 1, "model.causal",
        "causal=false: every token sees the next one, which the language model is to predict",
        "model.causal = true, or model.head = 'mlm'"),
    "_head_has_its_layers": (
        ["model.architecture=bert", "model.tie_embeddings=false"], 1, "model.tie_embeddings",
        "head='mlm' with tie_embeddings=false: it predicts by the token embedding",
        "model.tie_embeddings = true"),
    "exchanges_come_in_turn": (
        ["sync.method=diloco", "sync.period=30", "sync.fragments=4"], 1, "sync.fragments",
        "fragments=4 does not divide period=30", "1, 2, 3, 5, 6, 10, 15 or 30"),
    "error_feedback_is_used": (
        ["sync.method=local", "sync.error_decay=1"], 1, "sync.error_decay",
        "error_decay=1 with quantise=0 and top_k=0, which lose nothing",
        "sync.quantise or sync.top_k, or leave sync.error_decay out"),
    "_grid_takes_no_adapters": (
        ["lora.rank=4", "parallel.tp=4", "parallel.tp_mode=2d"], 4, "parallel.tp_mode",
        "lora.rank=4 with tp_mode='2d' of 2 x 2 ranks, which multiplies panels",
        "tp_mode '1d', or no adapters"),
    "replicas_divide": (
        [*SGD, "sync.method=dmsgd", "sync.replicas=3"], 4, "sync.replicas",
        "replicas=3 does not divide the 4 that 4 ranks can hold", "1, 2 or 4"),
    "method_takes_the_optimizer": (
        ["sync.method=lsgd"], 4, "sync.method",
        "method='lsgd' is not defined for optimizer.name='adamw'", "optimizer.name = 'sgd'"),
    "data_fits_head": (
        ["data.format=race"], 1, "data.format",
        "data.format='race' with head='lm'",
        "data.format = 'tokens' or 'conversations', or model.head = 'multiple_choice'"),
    "_rope_scaling_is_a_range": (
        ["model.position=rope", "model.rope_scaling.low_freq_factor=4"], 1,
        "model.rope_scaling.low_freq_factor",
        "low_freq_factor=4 is not below high_freq_factor=4", "below 4, as 1 and 4"),
    "_parallel_residual_fits": (
        ["model.parallel_residual=true", "model.norm_order=sandwich"], 1,
        "model.parallel_residual",
        "parallel_residual=true with norm_order='sandwich', which norms more than inputs",
        "model.norm_order = 'pre', or model.parallel_residual = false"),
    "_rope_scaling_fits_heads": (
        ["model.position=rope", "model.rope_scaling.kind=longrope",
         "model.rope_scaling.short_factors=" + str([1.5] * 16)], 1,
        "model.rope_scaling.long_factors",
        "0 long_factors for heads of 16 pairs", "a factor for each"),
    "_logits_are_of_tokens": (
        ["model.head=mlm", "model.logit_softcap=2"], 1, "model.logit_softcap",
        "logit_softcap=2 with head='mlm', which caps none", "0, or model.head = 'lm'"),
    "_norms_have_their_parts": (
        ["model.norm=rmsnorm", "model.norm_bias=true"], 1, "model.norm_bias",
        "norm_bias=true with norm='rmsnorm', which has none",
        "model.norm = 'layernorm', or norm_bias = false"),
    "_latents_have_heads": (
        [*MLA, "model.num_kv_heads=2"], 1, "model.num_kv_heads",
        "num_kv_heads=2 with model.mla, whose heads come from latents",
        "num_kv_heads = 8, or leave model.num_kv_heads out"),
    "_windows_have_layers": (
        ["model.window_pattern=LG"], 1, "model.window_pattern",
        "window_pattern='LG' with window=0, which limits no layer", "model.window of 1 or more"),
    "_pairs_rotate": (
        ["model.position=rope", "model.head_dim=32", "model.rotary_fraction=0.1"], 1,
        "model.rotary_fraction",
        "rotary_fraction=0.1 rotates 3 of head_dim=32 dimensions, which are no pairs",
        "a multiple of 2 / head_dim = 0.0625"),
    "data_is_shared_out": (
        ["data.split=-1,2,3"], 1, "data.split",
        'split "-1,2,3" is not up to three numbers >= 0 with a sum > 0',
        '"969,30,1" gives 96.9 % to train, 3 % to valid, 0.1 % to test'),
    "_trackers_differ": (
        ['train.trackers=["wandb", "tensorboard", "wandb"]'], 1, "train.trackers",
        "'wandb' is in it 2 times", "each once"),
    "_phases_follow": (
        ["phase.0.from_tokens=9000", "phase.1.from_tokens=9000"], 1, "phase.1.from_tokens",
        "from_tokens=9000 is not above the 9000 of the phase before", "9001 or more"),
    "_phases_keep_rules": (
        ["phase.0.from_tokens=9000", "phase.0.batch.micro_batch_size=3"], 1,
        "phase.0.batch.global_batch_size",
        "micro_batch_size*dp = 3*1 = 3 does not divide global_batch_size=16",
        "global_batch_size 15 or 18"),
    "_adapters_fit": (
        ["lora.rank=4", 'lora.targets=["q_prj"]'], 1, "lora.targets",
        "there is no target 'q_prj' in this model",
        "--set \"lora.targets=['c_attn']\"; known: c_attn, c_proj, c_fc"),
    "_weights_are_compiled": (
        ["train.compile=true", "parallel.pp=2", "parallel.schedule=zero_bubble"], 2,
        "train.compile",
        "compile=true with schedule='zero_bubble': a compiled backward is one piece, "
        "and zero_bubble computes the gradients of weights later",
        "train.compile = false, or schedule '1f1b', 'interleaved' or 'gpipe'"),
    "_graphs_are_the_same_each_time": (
        ["train.cuda_graphs=true", "train.device=cpu", "parallel.cp=2", "parallel.zero=3",
         "model.attention_dropout=0.1", "model.capacity_factor=1.25"], 2, "train.cuda_graphs",
        "cuda_graphs=true with cp=2, capacity_factor=1.25, attention_dropout=0.1, zero=3, "
        "device='cpu': what is replayed is one stage, "
        "exchanges nothing but among tp GPUs and asks no tensor for its values",
        "train.cuda_graphs = false, or data and tensor parallel GPUs with zero 0 or 1, and no "
        "expert capacity"),
    "_fp8_has_gemms": (
        ["train.precision=fp8", "model.hidden_size=250"], 1, "train.precision",
        "fp8_scaling='rowwise' takes weights whose rows and columns are multiples of 16, and the "
        "model has attention.qkv 768 x 250, attention.out 250 x 256, mlp.up 1000 x 250, "
        "mlp.down 250 x 1000",
        "widths that are multiples of 16, or train.precision = 'bf16'"),
    "_fp8_is_left": (
        ["train.precision=fp8", "train.fp8_scaling=blockwise", "parallel.tp=8",
         "model.ffn_hidden_size=512"], 8, "parallel.tp",
        "tp=8 leaves no weight whose rows and columns are multiples of 128 "
        "(fp8_scaling='blockwise'): attention.qkv 96 x 256, attention.out 256 x 32, "
        "mlp.up 64 x 256, mlp.down 256 x 64",
        "less tp, or train.precision = 'bf16'"),
    "_new_tokens_have_a_place": (
        ["train.new_tokens=['<a>', '<b>']"], 1, "train.new_tokens",
        "new_tokens=['<a>', '<b>'] without train.init: they are added to what weights know",
        "--init CHECKPOINT; a tokenizer of its own has them: preprocess --tokenizer FOLDER"),
}
ALSO = {  # further branches of the same rules
    "one bit updates all parameters alike": (
        ["sync.method=onebit", "sync.replicas=2", "optimizer.name=lamb",
         "optimizer.group=[{match=['embedding']}]"], 2, "sync.method",
        "method='onebit' with [[optimizer.group]]: it updates all parameters alike",
        "leave [[optimizer.group]] out, or sync.method = 'all_reduce'"),
    "new tokens differ": (
        ["train.new_tokens=['<b>', '<a>', '<b>']", "train.init=weights"], 1, "train.new_tokens",
        "new_tokens=['<b>', '<a>', '<b>'] has '<b>' twice", "texts that differ"),
    "new tokens have text": (
        ["train.new_tokens=['', '<a>']", "train.init=weights"], 1, "train.new_tokens",
        "new_tokens=['', '<a>'] has an empty text", "texts that differ"),
    "new tokens are of language models": (
        ["train.new_tokens=['<a>']", "train.init=weights", "model.architecture=bert"], 1,
        "train.new_tokens", "new_tokens=['<a>'] with head='mlm'",
        "leave train.new_tokens out: they are for language models"),
    "new tokens extend the tokenizer of the weights": (
        ["train.new_tokens=['<a>']", "train.init=weights", "data.tokenizer=other"], 1,
        "train.new_tokens", "new_tokens=['<a>'] with data.tokenizer='other'",
        "leave data.tokenizer out: they are added to that of train.init"),
    "a tied head is no module of its own": (
        ["lora.rank=4", "lora.modules_to_save=['lm_head']", "model.tie_embeddings=true"], 1,
        "lora.modules_to_save",
        "there is no module 'lm_head' to train whole in this model",
        "known: wte; its head is the embedding"),
    "adapters freeze all weights": (
        ["lora.rank=4", "train.freeze=['embedding']"], 1, "train.freeze",
        "freeze=['embedding'] with lora.rank=4, which freezes all weights",
        "leave train.freeze out, or lora.rank = 0"),
    "an encoder's tokens see all others": (
        ["model.architecture=bert", "model.causal=true"], 1, "model.causal",
        "head='mlm' with causal=true: a token would not see those after it",
        "model.causal = false"),
    "one class is none": (
        ["model.architecture=bert", "model.head=classification", "model.num_labels=1"], 1,
        "model.num_labels", "head='classification' with num_labels=1", "2 or more classes"),
    "a classifier reads no vocabulary": (
        ["model.architecture=bert", "model.head=multiple_choice", "model.tie_embeddings=true"], 1,
        "model.tie_embeddings",
        "head='multiple_choice' with tie_embeddings=true, and it reads no vocabulary",
        "leave model.tie_embeddings out"),
    "rows of no table": (
        ["model.position=rope", "model.position_offset=2"], 1, "model.position_offset",
        "position_offset=2 with position='rope', which has no table",
        "model.position = 'learned', or leave model.position_offset out"),
    "a first norm that is not attention's": (
        ["model.norm_order=post", "model.first_attention_norm=false"], 1,
        "model.first_attention_norm",
        "first_attention_norm=false with norm_order='post', where no norm is attention's alone",
        "norm_order = 'pre' or 'sandwich' without parallel_residual, or "
        "first_attention_norm = true"),
    "a first norm of both": (
        ["model.parallel_residual=true", "model.first_attention_norm=false"], 1,
        "model.first_attention_norm",
        "first_attention_norm=false with parallel_residual=true, where no norm is attention's "
        "alone", "norm_order = 'pre' or 'sandwich' without parallel_residual, or "
        "first_attention_norm = true"),
    "no layer ahead of the logits": (
        ["model.transform_bias=false"], 1, "model.transform_bias",
        "transform_bias=false with head='lm', which has no such layer",
        "model.head = 'mlm', or leave model.transform_bias out"),
    "no order without masked tokens": (
        ["model.sentence_order=true"], 1, "model.sentence_order",
        "sentence_order=true with head='lm', which predicts no order",
        "model.head = 'mlm', or leave model.sentence_order out"),
    "leaders of all before those of groups": (
        [*LSGD, "sync.period=8", "sync.global_period=4"], 4, "sync.global_period",
        "global_period=4 is below period=8", "8 or more"),
    "a centre that swings away": (
        ["sync.method=easgd", "optimizer.name=sgd", "sync.pull=0.4"], 4, "sync.pull",
        "pull=0.4 with 4 replicas: their distance to the centre is times "
        "1 - pull * (replicas + 1) = -1 at each exchange", "below 2 / (replicas + 1) = 0.4"),
    "a worker that skips alone": (
        [*LSGD, "sync.asynchronous=true", "train.on_nonfinite=skip"], 4, "sync.asynchronous",
        "asynchronous=true: between exchanges a worker asks no other, and on_nonfinite='skip' "
        "passes over the batch of all", "train.on_nonfinite = 'stop'"),
    "experts' adapters drop nothing": (
        [*MOE, "lora.rank=4", 'lora.targets=["experts.down_proj"]', "lora.dropout=0.1"], 1,
        "lora.dropout", "dropout=0.1 with adapters of routed experts, which drop nothing",
        "lora.dropout = 0, as in peft"),
    "adapters by rows": (
        ["lora.rank=4", "parallel.zero=3"], 2, "lora.rank",
        "rank=4 with zero=3: adapters are too small to be sharded by rows", "parallel.zero = 1"),
    "replicas of one model": (
        ["sync.replicas=2"], 4, "sync.replicas",
        "replicas=2 with method='all_reduce', which keeps them equal",
        "sync.method = 'diloco', or another, or leave sync.replicas out"),
    "a replica has its experts": (
        [*MOE, "parallel.ep=4", "sync.method=diloco"], 6, "sync.method",
        "a replica has pp * lcm(tp*cp, ep*etp) = 1 * 4 ranks, which do not divide the world of 6",
        "ranks (--nproc) that are a multiple of 4"),
    "zero shards over the ranks of a replica": (
        ["sync.method=diloco", "parallel.zero=1"], 4, "parallel.zero",
        "zero=1 shards over the data ranks of a replica, and with method='diloco' each of the 4 "
        "replicas has 1",
        "parallel.zero = 0, or sync.replicas below 4"),
    "dsgd has no momentum": (
        [*SGD, "sync.method=dsgd"], 4, "sync.method",
        "momentum=0.9 with method='dsgd', which has none",
        "sync.method = 'decentlam' or 'dmsgd', or momentum 0"),
    "neighbours and nesterov": (
        [*SGD, "optimizer.nesterov=true", "sync.method=dmsgd"], 4, "optimizer.nesterov",
        "nesterov=true with method='dmsgd', whose momentum is plain", "optimizer.nesterov = false"),
    "a machine in a ring": (
        [*SGD, "sync.method=dmsgd", "sync.machine_size=2"], 4, "sync.machine_size",
        "machine_size=2 with topology='ring', which has none",
        "sync.topology = 'hierarchical', or leave sync.machine_size out"),
    "machines of unequal size": (
        [*SGD, "sync.method=dmsgd", "sync.topology=hierarchical", "sync.machine_size=3"], 4,
        "sync.machine_size", "machine_size=3 does not divide the 4 replicas", "1, 2 or 4"),
    "a fragment without layers": (
        ["sync.method=local", "sync.period=26", "sync.fragments=13"], 1, "sync.fragments",
        "fragments=13 of num_layers=12 layers", "at most 12"),
    "an exchange that ends after its next turn": (
        ["sync.method=diloco", "sync.period=8", "sync.overlap_steps=8"], 1, "sync.overlap_steps",
        "overlap_steps=8 is not below period=8", "at most 7"),
    "an outer momentum that error feedback replaces": (
        ["sync.method=diloco", "sync.top_k=0.02", "sync.outer_momentum=0.5"], 1, "sync.top_k",
        "outer_momentum=0.5 with top_k=0.02, whose error feedback takes its place",
        "leave sync.outer_momentum out, or sync.quantise in place of top_k"),
    "odd heads cannot turn": (
        ["model.position=rope", "model.head_dim=33"], 1, "model.head_dim",
        "head_dim=33 is odd and rotary positions turn pairs", "32 or 34"),
    "experts without a router's choice": (
        ["model.num_experts=4"], 1, "model.top_k", "top_k=0 of num_experts=4 experts", "1 to 4"),
    "a choice without experts": (
        ["model.top_k=2"], 1, "model.top_k",
        "top_k=2 of num_experts=0 experts", "0 where there are no experts"),
    "a bias of no expert": (
        ["model.router_bias_update_rate=0.001"], 1, "model.router_bias_update_rate",
        "router_bias_update_rate=0.001 with num_experts=0, a dense model",
        "model.num_experts of 1 or more, or leave model.router_bias_update_rate out"),
    "a loss that only fp16 scales": (
        ["train.precision=bf16", "train.loss_scale=128"], 1, "train.loss_scale",
        "loss_scale=128.0 with precision='bf16', whose loss is not scaled",
        "train.precision = 'fp16', or leave train.loss_scale out"),
    "narrow moments that are sent as signs": (
        ["train.moments=bf16", "sync.method=onebit", "sync.replicas=2"], 2, "train.moments",
        "moments='bf16' with sync.method='onebit', which sums moments in float32",
        "'fp32', or another sync.method"),
    "a mean of squares that would never fall": (
        ["train.moments=bf16", "optimizer.betas=[0.9, 0.999]"], 1, "optimizer.betas",
        "a decay of 0.999 moves a mean by 0.001 of its value a step, and moments='bf16' round what "
        "is less than 1/256", "at most 0.996, or moments='fp32'"),
    "a momentum that would never fall": (
        ["train.moments=bf16", "optimizer.name=muon", "optimizer.momentum=0.997"], 1,
        "optimizer.momentum",
        "a decay of 0.997 moves a mean by 0.003 of its value a step, and moments='bf16' round what "
        "is less than 1/256", "at most 0.996, or moments='fp32'"),
    "narrow moments of a rule without": (
        ["train.moments=bf16", "optimizer.name=lamb"], 1, "train.moments",
        "moments='bf16' with name='lamb', whose state stays in fp32",
        "optimizer.name = 'adamw' or 'muon', or leave train.moments out"),
    "narrow sums of wide gradients": (
        ["train.gradients=bf16", "train.precision=fp32"], 1, "train.gradients",
        "gradients='bf16' with precision='fp32', which makes none of bfloat16",
        "train.precision = 'bf16' or 'fp8', or leave train.gradients out"),
    "narrow sums of float16": (
        ["train.gradients=bf16", "train.precision=fp16"], 1, "train.gradients",
        "gradients='bf16' with precision='fp16', which makes none of bfloat16",
        "train.precision = 'bf16' or 'fp8', or leave train.gradients out"),
    "narrow sums of a rule without": (
        ["train.gradients=bf16", "train.precision=bf16", "optimizer.name=sgd"], 1,
        "train.gradients",
        "gradients='bf16' with name='sgd', whose sums stay in fp32",
        "optimizer.name = 'adamw' or 'muon', or leave train.gradients out"),
    "scales without float8": (
        ["train.precision=bf16", "train.fp8_scaling=blockwise"], 1, "train.fp8_scaling",
        "fp8_scaling='blockwise' with precision='bf16', which scales nothing",
        "train.precision = 'fp8', or leave train.fp8_scaling out"),
    "a base of positions that do not turn": (
        ["model.rope_theta=5e5"], 1, "model.rope_theta",
        "rope_theta=500000.0 with position='learned', which turns nothing",
        "model.position = 'rope', or leave model.rope_theta out"),
    "a warm-up beyond the run": (
        ["optimizer.warmup_steps=11", "train.steps=10"], 1, "optimizer.warmup_steps",
        "warmup_steps=11 is above train.steps=10", "0 to 10"),
    "weights that are no numbers": (
        ['data.train=["nan", "a"]'], 1, "data.train",
        "weights [nan] are not all >= 0 with a sum > 0",
        "such as 7 and 3: shares, of any sum; leave out a dataset instead of a weight of 0"),
    "a split that leaves nothing to train on": (
        ["data.split=0,1,1", 'data.train=["a"]'], 1, "data.split",
        "split '0,1,1' gives train a share of 0", "a share above 0, as in '969,30,1'"),
    "a split that leaves nothing to evaluate": (
        ["data.split=9,0,1", 'data.train=["a"]', "train.eval_every=5"], 1, "data.split",
        "split '9,0,1' gives valid a share of 0", "a share above 0, as in '969,30,1'"),
    "a validation set that there is not": (
        ["data.valid.wiki=x", "data.valid.code=y", "train.best_of=wki"], 1, "train.best_of",
        "best_of='wki' is no set of data.valid", "'wiki' or 'code'"),
    "the best of one validation set": (
        ["data.valid=x", "train.best_of=wiki"], 1, "train.best_of",
        "best_of='wiki', and data.valid is no table of names",
        'data.valid = {wiki = "data/wiki", code = "data/code"}, or leave best_of out'),
    "a validation set without data": (
        ["data.valid.wiki=[]"], 1, "data.valid.wiki", "no data paths",
        'give prefixes, or weights and prefixes: ["0.7", "a"]'),
    "no validation loss to end by": (
        ["train.patience=2", "data.split=1,0,0", 'data.train=["a"]'], 1, "train.patience",
        "patience=2 with eval_every=0 and no data.valid: there is no validation loss",
        "train.eval_every of 1 or more and data.valid, or a valid part of data.split, or patience "
        "= 0"),
    "groups that do not divide the experts": (
        [*MOE, "model.router_groups=3"], 1, "model.router_groups",
        "router_groups=3 does not divide num_experts=8", "1, 2, 4 or 8"),
    "an odd part of heads that rotates": (
        [*MLA, "model.mla.rope_dim=15", "model.head_dim=143"], 1, "model.mla.rope_dim",
        "rope_dim=15 is odd and rotary positions turn pairs", "14 or 16"),
    "latents on a grid": (
        [*MLA, "parallel.tp=4", "parallel.tp_mode=2d", "batch.micro_batch_size=2",
         "batch.seq_len=31"], 4, "parallel.tp",
        "tp/tp_rows=2 does not divide the tokens of a row's micro-batch=31", "1"),
    "more tp ranks than heads with latents": (
        [*MLA, "parallel.tp=16"], 16, "parallel.tp", "tp=16 does not divide num_heads=8",
        "1, 2, 4 or 8"),
    "no layer with experts": (
        [*MOE, "model.first_dense_layers=2", "model.num_layers=2"], 1, "model.first_dense_layers",
        "first_dense_layers=2 of num_layers=2: no layer has experts",
        "at most 1, or num_experts = 0"),
    "more groups than there are": (
        [*MOE, "model.router_groups=2", "model.router_top_groups=4"], 1,
        "model.router_top_groups",
        "router_top_groups=4 of router_groups=2 groups", "1 to 2"),
    "router groups with too few experts": (
        [*MOE, "model.router_groups=8"], 1, "model.top_k",
        "top_k=2 of the 1 experts of router_top_groups=1",
        "at most 1, or more router_top_groups"),
    "padding to no capacity": (
        [*MOE, "model.pad_to_capacity=true"], 1, "model.pad_to_capacity",
        "pad_to_capacity=true with capacity_factor=0.0, which sets no capacity",
        "model.capacity_factor of 1.0 or more, or pad_to_capacity=false"),
    "a world smaller than a model": (
        ["parallel.tp=4"], 2, "parallel",
        "tp*cp*pp = 4*1*1 = 4 does not divide the world of 2 ranks",
        "run 4 ranks (--nproc), or choose tp*cp*pp among 1 or 2; for 1: "
        "--set parallel.tp=1"),
    "expert axes of a dense model": (
        ["parallel.ep=2"], 2, "parallel.ep",
        "ep=2 etp=1 cut experts, and num_experts=0",
        "set parallel.ep and parallel.etp to 1, or model.num_experts"),
    "experts that ep does not divide": (
        [*MOE, "parallel.ep=3"], 3, "parallel.ep",
        "ep=3 does not divide num_experts=8", "1, 2, 4 or 8"),
    "an expert's width that etp does not divide": (
        [*MOE, "parallel.etp=5"], 5, "parallel.etp",
        "etp=5 does not divide moe_ffn_hidden_size=96", "1, 2, 3, 4, 6, 8, 12 or 16"),
    "biases of experts whose columns etp does not divide": (
        [*MOE, "model.expert_bias=true", "parallel.etp=3"], 3, "parallel.etp",
        "etp=3 does not divide hidden_size=256", "1, 2, 4 or 8"),
    "fewer heads than ranks": (
        ["parallel.tp=16", "batch.global_batch_size=64"], 16, "parallel.tp",
        "tp=16 does not divide num_heads=8", "1, 2, 4 or 8"),
    "key-value heads that ranks share unevenly": (
        ["parallel.tp=4", *LLAMA, "model.num_kv_heads=3"], 4, "parallel.tp",
        "tp=4 does not divide num_kv_heads=3", "1, 3, 6 or 12"),
    "columns of a head that ranks share": (
        ["parallel.tp=12", *LLAMA, "model.num_kv_heads=1", "model.head_dim=32"], 12, "parallel.tp",
        "tp/num_kv_heads = 12/1 = 12 ranks share a key-value head and do not divide head_dim=32",
        "1, 2 or 4"),
    "an MLP that tp does not divide": (
        ["parallel.tp=4", "model.ffn_hidden_size=90"], 4, "parallel.tp",
        "tp=4 does not divide ffn_hidden_size=90", "1, 2, 3, 5, 6, 9, 10 or 15"),
    "ranks that are no square": (
        ["parallel.tp_mode=2d", "parallel.tp=8"], 8, "parallel.tp",
        "tp=8 with tp_mode='2d' is no square",
        "tp 4 or 9, or parallel.tp_rows among 1, 2, 4 or 8"),
    "rows that tp does not have": (
        ["parallel.tp_mode=2d", "parallel.tp=8", "parallel.tp_rows=3"], 8, "parallel.tp_rows",
        "tp_rows=3 does not divide tp=8", "1, 2, 4 or 8"),
    "rows of ranks in one dimension": (
        ["parallel.tp=4", "parallel.tp_rows=2"], 4, "parallel.tp_rows",
        "tp_rows=2 with tp_mode='1d', which has no rows",
        "parallel.tp_mode = '2d', or leave parallel.tp_rows out"),
    "columns of a grid that do not divide the hidden size": (
        ["parallel.tp_mode=2d", "parallel.tp=6", "parallel.tp_rows=2"], 6, "parallel.tp",
        "tp_mode='2d' of 2 x 3 ranks has 3 columns, which do not divide hidden_size=256",
        "columns 1, 2, 4, 8, 16, 32, 64 or 128: panels of hidden columns are not padded"),
    "columns of a grid that heads do not fill": (
        ["parallel.tp_mode=2d", "parallel.tp=32", "parallel.tp_rows=2"], 32, "parallel.tp",
        "tp/tp_rows=16 does not divide num_heads=8", "tp/tp_rows 1, 2, 4 or 8"),
    "columns of a grid that an MLP does not fill": (
        ["parallel.tp_mode=2d", "parallel.tp=16", "model.ffn_hidden_size=90"], 16, "parallel.tp",
        "tp/tp_rows=4 does not divide ffn_hidden_size=90", "1, 2, 3, 5, 6, 9, 10 or 15"),
    "a grid whose rows have too few tokens for experts": (
        [*MOE, "parallel.tp_mode=2d", "parallel.tp=4", "batch.micro_batch_size=2",
         "batch.seq_len=7"], 4, "parallel.tp",
        "tp/tp_rows=2 does not divide the tokens of a row's micro-batch=7", "1 or 7"),
    "a grid in a compiled graph": (
        ["parallel.tp_mode=2d", "parallel.tp=4", "train.compile=true"], 4, "train.compile",
        "compile=true with tp_mode='2d' of 2 x 2 ranks: collectives of its GEMMs are in no graph",
        "train.compile = false, or tp_mode '1d'"),
    "a shared expert that tp does not divide": (
        [*MOE, "parallel.tp=4", "model.shared_expert_ffn_hidden_size=90"], 4, "parallel.tp",
        "tp=4 does not divide shared_expert_ffn_hidden_size=90",
        "1, 2, 3, 5, 6, 9, 10 or 15"),
    "heads that are too few to exchange": (
        ["parallel.cp=2", "parallel.tp=8", "parallel.cp_mode=a2a"], 16, "parallel.cp",
        "cp_mode='a2a' cuts heads, and tp*cp=8*2 does not divide num_kv_heads=8",
        "tp*cp 1, 2, 4 or 8, or cp_mode 'ring' or 'all_gather'"),
    "shards of a table that two stages of a rank share": (
        ["parallel.zero=3", "parallel.vpp=2", "parallel.schedule=interleaved"], 2, "parallel.vpp",
        "zero=3 with pp=1 and vpp=2: two stages of a rank share the tied embedding",
        "vpp 1, which computes the same"),
    "stages that were not all given": (
        ["parallel.pp=2", "parallel.stage_layers=[6, 5]"], 2, "parallel.stage_layers",
        "stage_layers has 2 stages of 11 layers, and the run has pp*vpp=2 stages of num_layers=12",
        "give 2 numbers that sum to 12"),
    "an interleaved schedule of one chunk": (
        ["parallel.pp=2", "parallel.schedule=interleaved"], 2, "parallel.schedule",
        "vpp=1 with schedule='interleaved'",
        "vpp > 1 takes schedule = 'interleaved', and the other schedules take vpp = 1"),
    "sequences that are chosen again while replicas take turns": (
        [*LSGD, "sync.asynchronous=true", "data.reselect_every=5", "data.subset=a.json"], 4,
        "data.reselect_every", "reselect_every=5 with sync.asynchronous=true",
        "sync.asynchronous = false, or reselect_every = 0"),
    "a batch smaller than one micro-batch each": (
        ["batch.global_batch_size=1"], 1, "batch.global_batch_size",
        "micro_batch_size*dp = 8*1 = 8 does not divide global_batch_size=1",
        "global_batch_size 8"),
}
# fmt: on


def test_a_broken_rule_says_both_numbers_and_what_would_be_legal(subtests):
    for case, (overrides, world, field, message, hint) in (BROKEN | ALSO).items():
        found = problems(load_config("tiny", [*GPT, *overrides]), world)
        with subtests.test(case):
            assert (message, hint, field) in [tuple(problem) for problem in found]


def test_every_rule_has_a_case_here_that_only_it_reports():
    assert [rule.__name__ for rule in RULES if rule.__name__ not in BROKEN] == []
    for rule in RULES:
        overrides, world, _, message, _ = BROKEN[rule.__name__]
        config = load_config("tiny", [*GPT, *overrides])
        assert message in [problem.message for problem in rule(config, world)]


def test_grids_of_ranks_can_be_run():
    for tp, rows in ((4, 2), (8, 4), (2, 2), (4, 1)):
        sizes = [f"parallel.tp={tp}", f"parallel.tp_rows={rows}"]
        assert load_checked("tiny", ["parallel.tp_mode=2d", *sizes], tp).parallel.grid_rows == rows


def test_rows_are_a_square_s_side_where_they_are_not_given():
    rows = {
        ("tp=9",): 3, ("tp=6", "tp_rows=2"): 2, ("tp=6", "tp_rows=1"): 1, ("tp=1",): 1,
    }  # fmt: skip
    for sizes, expected in rows.items():
        overrides = ["parallel.tp_mode=2d", *(f"parallel.{size}" for size in sizes)]
        assert load_config("tiny", overrides).parallel.grid_rows == expected
    assert load_config("tiny", ["parallel.tp=4"]).parallel.grid_rows == 1


def test_a_compiled_run_needs_a_compiler_and_a_planned_one_does_not(monkeypatch, tmp_path):
    asked = ["train.compile=true"]
    compiler = tmp_path / "some-cxx"
    compiler.touch(mode=0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert load_checked("tiny", asked, 1).train.compile
    monkeypatch.setenv("CXX", "no-such-cxx")
    with pytest.raises(MtcliError) as error:
        load_checked("tiny", [*asked, "parallel.tp=3"], 3)
    assert error.value.code is Exit.WRONG_INPUT
    assert "compile=true needs a C++ compiler, and there is no no-such-cxx" in str(error.value)
    assert "tp=3 does not divide" in str(error.value), "all problems at once"
    assert problems(load_config("tiny", asked), 1) == []
    assert load_checked("tiny", [*asked, "train.device=cuda"], 1).train.compile


def test_a_legal_config_has_no_problems():
    plain = ["parallel.tp=2", "parallel.pp=2"]
    interleaved = ["parallel.pp=4", "parallel.vpp=3", "parallel.schedule=interleaved"]
    folded = [*MOE, "parallel.ep=4", "parallel.etp=2"]
    for overrides in (plain, interleaved, folded):
        config = load_config("tiny", [*GPT, "batch.micro_batch_size=1", *overrides])
        assert problems(config, 16) == []
        require(config, 16)


def test_no_sequence_parallelism_asks_nothing_of_the_tokens():
    overrides = ["parallel.tp=8", "batch.micro_batch_size=1", "batch.seq_len=12"]
    config = load_config("tiny", [*GPT, *overrides, "parallel.sequence_parallel=false"])
    assert problems(config, 8) == []


def test_all_broken_rules_are_raised_together_with_exit_code_2():
    config = load_config(
        "tiny", [*GPT, "parallel.tp=3", "parallel.pp=5", "batch.seq_len=512", "optimizer.lr=0"]
    )
    with pytest.raises(MtcliError) as caught:
        require(config, 16)
    assert caught.value.code == Exit.WRONG_INPUT
    assert [problem.field for problem in caught.value.problems] == [
        "batch.seq_len",
        "optimizer.min_lr",
        "parallel",
        "parallel.tp",
        "parallel.tp",
        "parallel.tp",
        "parallel.pp",
    ]
    hints = [problem.hint for problem in caught.value.problems]
    assert hints[3] == hints[4], "which is said once"
    assert str(caught.value).count("\n\nhint: ") == 6 + 1, "and the nearest legal layouts"


def test_data_parallel_is_what_the_other_axes_leave():
    config = load_config("tiny", ["parallel.tp=2", "parallel.cp=3", "parallel.pp=2"])
    assert data_parallel_size(config, 48) == 4
    assert data_parallel_size(config, 5) == 1  # never 0: other rules are still applied


def test_the_split_and_the_weights_are_told_together():
    given = ["data.split=x", 'data.train=["-1", "a"]', 'data.valid=["0", "b"]']
    fields = [problem.field for problem in problems(load_config("tiny", given), 1)]
    assert fields == ["data.train", "data.valid", "data.split"]


def test_a_split_that_makes_no_sense_needs_no_data_to_be_refused():
    for split in ("x", "nan,1,1", "-1,2,3", "1,inf,1", "1e400,1,1", "9" * 400, ""):
        found = problems(load_config("tiny", [f"data.split='{split}'"]), 1)
        assert [problem.field for problem in found] == ["data.split"], split


def test_every_field_of_experts_is_refused_on_a_dense_model():
    given = {
        "first_dense_layers": 1, "routed_scale": 2.0,
        "moe_ffn_hidden_size": 64, "shared_expert_ffn_hidden_size": 64, "shared_expert_gate": True,
        "normalize_top_k": False, "router_score": "sigmoid", "router_groups": 2,
        "router_top_groups": 2, "capacity_factor": 1.0, "drop_policy": "position",
        "drop_scope": "sub_sequence", "pad_to_capacity": True, "aux_loss_coeff": 0.1,
        "sequence_aux_loss_coeff": 0.1, "router_bias_update_rate": 0.1, "router_biases": True,
        "z_loss_coeff": 0.1,
    }  # fmt: skip
    model = load_config("tiny").model.model_copy(update=given | {"router_groups": 2})
    config = load_config("tiny").model_copy(update={"model": model})
    assert [p.field for p in problems(config, 1)] == [f"model.{name}" for name in given]
    names = list(type(model).model_fields)
    rest = {"num_experts", "top_k"}
    assert {*names[names.index("num_experts") :]} == {*given} | rest, "and there are no others"


def test_a_dense_model_of_an_architecture_with_experts_is_told_what_the_user_set():
    table = {"model": {"preset": "tiny", "architecture": "qwen2-moe", "num_experts": 0, "top_k": 0}}
    table["model"] |= {"position": "learned", "capacity_factor": 1.0}
    assert [p.field for p in problems(config_of(table), 1)] == ["model.capacity_factor"]


def test_divisors_are_all_the_numbers_that_divide():
    for n in range(1, 200):
        assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


def test_long_lists_keep_their_ends():
    assert listing([1]) == "1"
    assert listing([1, 2]) == "1 or 2"
    assert listing(divisors(720)) == "1, 2, 3, 4, 5, 6, 8, 9, ... or 720"


def test_unknown_keys_illegal_values_and_broken_rules_are_reported_together():
    given = ["optimizer.lrr=1", "parallel.pp=0", "parallel.tp=3", "batch.global_batch_size=7"]
    with pytest.raises(MtcliError) as caught:
        load_checked("tiny", given, 2)
    text = str(caught.value)
    assert "unknown key 'lrr' in [optimizer]" in text
    assert "parallel.pp: 0 should be at least 1" in text
    assert "tp*cp*pp = 3*1*1 = 3 does not divide the world of 2 ranks" in text
    assert "micro_batch_size*dp = 8*1 = 8 does not divide global_batch_size=7" in text
    assert load_checked("tiny", [], 2) == load_config("tiny")


def test_a_batch_is_divided_over_the_data_ranks_alone():
    batch = ["batch.micro_batch_size=2", "batch.global_batch_size=4"]
    assert problems(load_config("tiny", ["parallel.tp=4", *batch]), 8) == []  # dp=2


ROPE = ["model.position=rope", "model.rope_scaling.kind=yarn"]
SHORT, LONG = str([2.0] * 16), ["model.rope_scaling.kind=longrope"]
LONG += [f"model.rope_scaling.{name}_factors={[1.5] * 32}" for name in ("short", "long")]
OTHER_BREAKS = [
    (["model.window=4", "model.window_pattern=G"], "model.window_pattern",
     "window=4 with window_pattern='G': no layer is local"),
    # the letter of the only layer is G
    (["model.num_layers=1", "model.window=4", "model.window_pattern=GL"], "model.window_pattern",
     "window=4 with window_pattern='GL': no layer is local"),
    (["model.position=rope", "model.rotary_fraction=0.01"], "model.rotary_fraction",
     "rotary_fraction=0.01 rotates 0 of head_dim=64 dimensions, which are no pairs"),
    (["model.position=rope", "model.num_layers=1", "model.rope_pattern=NR"], "model.rope_pattern",
     "rope_pattern='NR': no layer rotates"),
    (["model.position=rope", "model.rope_local_theta=9"], "model.rope_local_theta",
     "rope_local_theta=9.0 with window=0, which no layer has"),
    ([*ROPE[:1], *LONG, "model.rope_scaling.original_max_seq_len=1"],
     "model.rope_scaling.original_max_seq_len", "longrope with original_max_seq_len=1"),
    ([*ROPE[:1], *LONG, "model.rotary_fraction=0.5", "model.rope_scaling.long_factors=" + SHORT],
     "model.rope_scaling.short_factors", "32 short_factors for heads of 16 pairs"),
    ([*ROPE[:1], "model.rope_scaling.kind=dynamic", "model.head_dim=2"], "model.rope_scaling.kind",
     "kind='dynamic' has no base for heads of one pair"),
    (["model.head_bias=true"], "model.head_bias",
     "head_bias=true with tie_embeddings=true, whose head has no layer of that kind"),
    (["model.head_bias=true", "model.tie_embeddings=false", "model.logit_scale=2"],
     "model.logit_scale", "logit_scale=2 with head_bias=true, which it would not multiply"),
    (["model.parallel_norms=1"], "model.parallel_norms",
     "parallel_norms=1 with parallel_residual=false: the MLP's input is another"),
    (["model.activation_limit=3"], "model.activation_limit",
     "activation_limit=3.0 with activation='gelu_tanh', which clamps nothing"),
    (["model.rope_pattern=RN"], "model.rope_pattern",
     "rope_pattern='RN' with position='learned', which turns nothing"),
    ([*ROPE, "model.rope_scaling.beta_slow=32"], "model.rope_scaling.beta_slow",
     "beta_slow=32 is not below beta_fast=32"),
    ([*ROPE, "model.rope_theta=1"], "model.rope_theta", "rope_theta=1 turns all pairs alike"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "field", "message"), OTHER_BREAKS)
def test_a_rule_of_windows_or_rotation_is_broken_in_its_other_ways(overrides, field, message):
    (problem,) = problems(load_config("tiny", overrides), 1)
    assert (problem.field, problem.message) == (field, message)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.window=4", "model.window_pattern=GL"],
        ROPE,
        [*ROPE, "model.window=1"],
        [*ROPE, "model.window=4", "model.rope_local_theta=9", "model.rope_pattern=RN"],
        [*ROPE, "model.head_dim=33", "model.rotary_fraction=0.5"],
        ["model.parallel_residual=true"],
        ["model.head_bias=true", "model.tie_embeddings=false"],
        ["model.parallel_residual=true", "model.parallel_norms=1"],
        [*ROPE[:1], *LONG],
        [*ROPE[:1], "model.rope_scaling.kind=dynamic"],
    ],
)
def test_legal_windows_and_scalings_have_no_problems(overrides):
    assert problems(load_config("tiny", overrides), 1) == []


def test_a_warm_up_may_be_all_of_a_run():
    assert problems(load_config("tiny", ["train.steps=5", "optimizer.warmup_steps=5"]), 1) == []
