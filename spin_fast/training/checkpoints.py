"""Models in files: one safetensors file with the weights and the constructor's arguments."""

from __future__ import annotations

import json
from contextlib import suppress
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch

from .._common import files
from ..graphs.node_features import NodeFeatures
from ..nn import SPIN, Ensemble, GraphClassifier, GraphModel, SubtreeLinear

CHECKPOINT_FORMAT = "spin_fast checkpoint 5"  # another hash of subtree patterns is another format, too
Saved = SPIN | SubtreeLinear | Ensemble
MODELS: dict[str, type[Saved]] = {model.__name__: model for model in (SPIN, SubtreeLinear, Ensemble)}


def save_checkpoint(path: str | Path, model: GraphModel, **metadata: Any) -> None:
    """Write the model to one safetensors file, with its constructor's arguments, ``metadata`` (JSON values), and which
    parameters are frozen (``requires_grad_(False)``).

    Of the metadata ``spin-fast predict`` takes ``node_features`` and ``edge_options``, to read files as those of the
    training were, such as ``Folder.features`` and ``{"undirected": True}``; and ``classes`` or ``task_names``, lists of
    names. Without them columns are taken in the order of the file, edges as they are listed, and classes by number.

    Its ``node_features``, if there are any, become ``preprocessing`` in the metadata; its ``operator`` and
    ``multilabel`` have these names there, and the former may be given for a model that does not know it.

    The file is written under a temporary name and renamed, so a reader never sees half of it.

    Raises:
        TypeError: metadata that are no JSON value, named; or the model, or a member of an ``Ensemble``, is neither a
            ``SPIN`` nor a ``SubtreeLinear`` as their constructors make them. A ``PAGNN`` is made of any modules, which
            a file cannot name, and so is a model of which modules were replaced; keep their weights by
            ``torch.save(model.state_dict(), path)``.
        ValueError: ``operator`` is none that the model can be trained with, or another one than it was; a parameter is
            not finite. OSError: the file cannot be written.
    """
    kind = _kind(model)
    config: dict[str, Any] = model.config  # type: ignore[assignment]
    if isinstance(model, Ensemble):
        config = config | {"members": [_facts(member) for member in model.members]}
    for name, value in metadata.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name} must be a JSON value, got {type(value).__name__}: {error}") from error
    if wrong := [name for name, value in model.state_dict().items() if not bool(value.isfinite().all())]:
        raise ValueError(f"model must have finite parameters, got NaN or infinity in {', '.join(wrong)}")
    if metadata.get("operator") is not None or model.operator is not None:
        metadata["operator"] = model.check_operator(metadata.get("operator"))
    if model.multilabel is not None:
        metadata["multilabel"] = model.multilabel
    if model.node_features is not None:
        metadata["preprocessing"] = model.node_features.to_dict()
    elif metadata.get("preprocessing") is not None:
        raise ValueError("preprocessing must be left out: it is the node_features of the model, which has none")
    frozen = [name for name, value in model.named_parameters() if not value.requires_grad]
    header = {
        "model": kind,
        "config": json.dumps(config, default=methodcaller("item")),  # numpy's numbers
        "metadata": json.dumps(metadata),
        "frozen": json.dumps(frozen),
    }
    files.write_tensors(Path(path), CHECKPOINT_FORMAT, model.state_dict(), header)


def load_checkpoint(path: str | Path) -> tuple[Saved, dict[str, Any]]:
    """Read a model, with its ``node_features``, ``operator`` and ``multilabel``, and its metadata back.

    The model is on the CPU and in evaluation mode; to train it on in a loop of your own call ``model.train()``.

    Raises:
        FileNotFoundError: no such file. ValueError: the file is not a checkpoint of this package, is damaged, or of
            another version of the format.
    """
    state, header = files.read_tensors(Path(path), CHECKPOINT_FORMAT)
    try:
        metadata = json.loads(header["metadata"])
        named = {name: metadata.get(name) for name in ("operator", "preprocessing")}
        arguments = header["model"], json.loads(header["config"])
        with torch.device("meta"):  # wrong sizes may be huge: nothing is allocated before they are those of the arrays
            _new_model(*arguments, **named).load_state_dict({name: of.to("meta") for name, of in state.items()})
        model = _new_model(*arguments, **named)
        model.load_state_dict(state, assign=True)  # a copy would round float64
        if isinstance(metadata.get("multilabel"), bool):
            for one in (model, *getattr(model, "members", ())):
                one.multilabel = metadata["multilabel"]
        for name in json.loads(header["frozen"]):
            model.get_parameter(name).requires_grad_(False)
    except Exception as error:  # whatever wrong contents lead to
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())}") from error
    return model.eval(), metadata


def _kind(model: GraphModel) -> str:
    """The name of its class, by which and by its arguments it can be made again."""
    name = got = type(model).__name__
    if MODELS.get(name) is type(model):
        if isinstance(model, Ensemble):
            return name
        with torch.device("meta"):
            made = MODELS[name](**model.config)
        if repr(made) == repr(model) and made.state_dict().keys() == model.state_dict().keys():
            return name
        got = f"one with other modules or parameters than {name}(**model.config) has"
    raise TypeError(
        f"model must be a {', '.join(MODELS)}, whose arguments a checkpoint holds, got {got}; "
        "keep the weights of others by torch.save(model.state_dict(), path)"
    )


def _facts(member: GraphModel) -> dict[str, Any]:
    """The arguments of :func:`_new_model` for a member of an ensemble."""
    made = member.node_features
    facts = {"model": _kind(member), "config": member.config, "operator": member.operator}
    return facts | {"preprocessing": None if made is None else made.to_dict()}


def _new_model(model: str, config: dict[str, Any], operator: Any, preprocessing: dict[str, Any] | None) -> Saved:
    """A model of this class and arguments, with its operator and its node features."""
    if model == Ensemble.__name__:
        return Ensemble([_new_model(**member) for member in config["members"]])
    made = MODELS[model](**config)
    if isinstance(made, GraphClassifier):
        with suppress(TypeError, ValueError):  # the name was free once: other values are the user's
            made.operator = made.check_operator(operator)
    if preprocessing is not None:
        made.node_features = NodeFeatures.from_dict(preprocessing)
    return made
