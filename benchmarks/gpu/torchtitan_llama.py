"""torchtitan's Llama, a contender whose package is optional."""

import torch
from contenders import Contender, hf_state, stepper

from mtcli.core.config.errors import wrong
from mtcli.core.config.schema import RunConfig


def torchtitan(config: RunConfig, device: torch.device) -> Contender:
    """torchtitan's Llama 3 in one process, without its parallelism."""
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs
    from torchtitan.models.llama3.model.args import RoPEScalingArgs
    from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

    m, scaling = config.model, config.model.rope_scaling
    if 8 * m.hidden_size // 3 > m.ffn_hidden_size or m.tie_embeddings:
        raise wrong("torchtitan's Llama is wider than 8/3 of hidden_size, and not tied")
    turns = RoPEScalingArgs(scaling_factor=1.0)
    if scaling is not None:
        turns = RoPEScalingArgs(
            scaling.factor,
            scaling.low_freq_factor,
            scaling.high_freq_factor,
            scaling.original_max_seq_len,
        )
    arguments = TransformerModelArgs(
        dim=m.hidden_size,
        n_layers=m.num_layers,
        n_heads=m.num_heads,
        n_kv_heads=m.num_kv_heads,
        vocab_size=m.vocab_size,
        multiple_of=m.ffn_hidden_size,  # to which it rounds 8/3 of its width up
        norm_eps=m.norm_eps,
        rope_theta=m.rope_theta,
        rope_scaling_args=turns,
        max_seq_len=m.max_seq_len,
    )
    with device:
        model = Transformer(arguments)
    state = hf_state(config, device)
    model.load_state_dict(Llama3StateDictAdapter(arguments, None).from_hf(state))
    model.train()
    return stepper(model, model, config, device)
