"""The table of operators: which of torch's modules have a fused form."""

from torch import nn

from mtcli_fused import operators
from mtcli_fused.attention import MultiheadAttention

OPERATORS = {
    operators.Linear: (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear),
    operators.Convolution: (nn.Conv1d, nn.Conv2d, nn.Conv3d),
    operators.TransposedConvolution: (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    operators.BatchNorm: (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    operators.LayerNorm: (nn.LayerNorm,),
    operators.RMSNorm: (nn.RMSNorm,),
    operators.GroupNorm: (nn.GroupNorm,),
    operators.PReLU: (nn.PReLU,),
    operators.Embedding: (nn.Embedding,),
    operators.DropoutPerModel: (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    MultiheadAttention: (nn.MultiheadAttention,),
}
# torch's class -> ours, which is torch's but for its forward
FUSED = {
    theirs: type(theirs.__name__, (ours, theirs), {})
    for ours, classes in OPERATORS.items()
    for theirs in classes
}
# Operators for which samples outermost make no copies; for the others it is models outermost.
OF_CHANNELS = (
    operators.Convolution, operators.TransposedConvolution, operators.BatchNorm, operators.GroupNorm
)  # fmt: skip


def operator_of(module: nn.Module) -> type | None:
    """The fused class for a module: that of torch's class whose forward it has."""
    for cls in type(module).__mro__:
        if cls in FUSED and type(module).forward is cls.forward:
            return FUSED[cls]
    return None
