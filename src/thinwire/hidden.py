"""Which parameters of a model the update rule ``muon`` is for."""

from contextlib import suppress

from torch import nn

Named = tuple[str, nn.Parameter]

# What has matrices that stand for something else: a row per token, or kernels.
_OTHERS = (nn.Embedding, nn.EmbeddingBag, nn.Conv1d, nn.ConvTranspose1d)


def hidden_and_rest(model: nn.Module, output: nn.Module | None = None) -> tuple[list[Named], list[Named]]:
    """The matrices between a model's input and its output, and all other parameters, each with its name.

    The update rule ``muon`` is for the former; stacks of matrices, such as experts, are among them. The rest are embeddings,
    the output layer, convolutions and all that is no matrix: norms, biases, the positions and tokens of a vision
    transformer. They want a rule of their own, at about a tenth of the rate:

        hidden, rest = hidden_and_rest(model)
        DeMo.recommended([{"params": hidden}, {"params": rest, "update": "adamw", "lr": 4e-3}], lr=4e-2)

    ``output`` is the output layer. Without it, it is what ``get_output_embeddings()`` of the model, or of what it wraps,
    says, or else the last `torch.nn.Linear` that it defines, which is wrong where that is called earlier or the model ends
    without one.
    """
    if output is None:
        output = _output_of(model)
    elif not isinstance(output, nn.Module):
        raise TypeError(f"output must be a module of the model, such as model.lm_head, got {type(output).__name__}")
    elif not any(module is output for module in model.modules()):
        raise ValueError(f"output must be a module of the model itself, and this {type(output).__name__} is not one of them")
    outer = [module for module in model.modules() if isinstance(module, _OTHERS)]
    apart = {id(parameter) for module in (*outer, output) if module is not None for parameter in module.parameters()}
    hidden, rest = list[Named](), list[Named]()
    for name, parameter in model.named_parameters():
        is_matrix = parameter.dim() in (2, 3) and min(parameter.shape) > 1
        (hidden if is_matrix and id(parameter) not in apart else rest).append((name, parameter))
    return hidden, rest


def _output_of(model: nn.Module) -> nn.Module | None:
    inner, says = model, getattr(model, "get_output_embeddings", None)
    while says is None and len(children := list(inner.children())) == 1:  # what wraps the model has it alone
        inner = children[0]
        says = getattr(inner, "get_output_embeddings", None)
    if says is not None:
        with suppress(NotImplementedError):
            if isinstance(found := says(), nn.Module):
                return found
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return linear[-1] if linear else None
