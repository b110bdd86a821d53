"""Parts of models: repeated blocks, embedding and head."""

from typing import Any, NamedTuple

from torch import nn

from shardlab.core.errors import UserError


class Parts(NamedTuple):
    """Parts of a language model, on any device."""

    blocks: list[nn.Module]
    """repeated blocks, in the order of their use"""
    paths: list[str]
    """name of each block in the model"""
    embedding: nn.Module | None
    """token embedding; None for a model that is not from Hugging Face"""
    head: nn.Module | None
    """output head; None where there is none, or for a model that is not from Hugging Face"""
    tied: bool
    """whether embedding and head share their weight"""


def model_parts(model: nn.Module) -> Parts:
    """Find the parts of `model`, which is not yet wrapped.

    Raises:
        UserError: the model has no list of blocks.
    """
    blocks = transformer_blocks(model)
    names = {module: name for name, module in model.named_modules()}
    paths = [names[block] for block in blocks]
    if not hasattr(model, "get_output_embeddings"):
        return Parts(blocks, paths, None, None, tied=False)
    # a PreTrainedModel, whose class scripts without transformers need not have
    pretrained: Any = model
    embedding, head = pretrained.get_input_embeddings(), pretrained.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    return Parts(blocks, paths, embedding, head, tied)


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Find the repeated blocks of a transformer: the list of modules with most of the parameters.

    A list is a `ModuleList`, or a `Sequential` of one class. Lists inside of blocks (experts) hold
    less than the list of blocks, however long they are.

    Raises:
        UserError: the model has no list of blocks.
    """
    lists = [module for module in model.modules() if _is_list(module)]
    if not lists:
        raise UserError(
            f"model: {type(model).__name__} has no list of blocks to wrap: use wrap: root"
        )
    largest = max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()))
    return list(largest.children())


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained matrices of the blocks, which Muon updates: no embedding and no head.

    Raises:
        UserError: there is none.
    """
    matrices = [
        parameter
        for block in transformer_blocks(model)
        for parameter in block.parameters()
        if parameter.dim() == 2 and parameter.requires_grad
    ]
    if not matrices:
        raise UserError(
            f"train.optimizer: no block of {type(model).__name__} has a matrix that is trained: "
            "set adamw in place of muon"
        )
    return [*dict.fromkeys(matrices)]


def _is_list(module: nn.Module) -> bool:
    if isinstance(module, nn.Sequential):
        return len({type(child) for child in module}) == 1
    return isinstance(module, nn.ModuleList)


def has_dropout(module: nn.Module) -> bool:
    """Return whether a module drops elements in training: by a part of it, or by a probability that
    is an attribute, as attention has it."""
    return any(
        type(value) is float and value > 0
        for part in module.modules()
        for name, value in vars(part).items()
        if "drop" in name or (name == "p" and isinstance(part, nn.Dropout))
    )
