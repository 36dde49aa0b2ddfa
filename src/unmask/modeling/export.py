"""To stock transformers: a folder that `AutoModel.from_pretrained` loads where unmask is not installed."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase

from unmask.modeling import rotary
from unmask.modeling.head import head_names
from unmask.modeling.pretraining import PretrainingModel


def stock_model(model: PretrainingModel) -> PreTrainedModel:
    """The stock class that holds what is kept: encoder and head for MLM, the encoder alone where it saw no [MASK].

    A pooler, where the stock class has one, is left at its random initialisation.
    """
    config = model.config.encoder
    if keeps_head(model):
        stock = AutoModelForMaskedLM.from_config(config)
        stock.base_model.load_state_dict(model.encoder.state_dict())
        names = head_names(config)
        assert names is not None
        projection = stock.get_submodule(names.projection)
        if names.dense:
            stock.get_submodule(names.dense).load_state_dict(model.head.dense.state_dict())
            stock.get_submodule(names.norm).load_state_dict(model.head.norm.state_dict())
        with torch.no_grad():
            if model.head.weight is not None:
                projection.weight.copy_(model.head.weight)
            if model.head.bias is not None:
                (stock.get_parameter(names.bias) if names.bias else projection.bias).copy_(model.head.bias)
        stock.tie_weights()
        return stock
    stock = AutoModel.from_config(config)
    missing, unexpected = stock.load_state_dict(model.encoder.state_dict(), strict=False)
    strange = [key for key in [*missing, *unexpected] if "pooler" not in key and "inv_freq" not in key]
    assert not strange, strange
    if model.objective.state_positions == "rotary":
        rotary.write_frequencies(stock)
    return stock


def keeps_head(model: PretrainingModel) -> bool:
    """Whether the LM head reads the encoder itself, so that a stock fill-mask model comes out."""
    return model.decoder is None and model.objective.states == 1 and head_names(model.config.encoder) is not None


def export(
    model: PretrainingModel, tokenizer: PreTrainedTokenizerBase, folder: Path, facts: dict[str, Any] | None = None
) -> Path:
    """Write the stock checkpoint, its tokenizer and a model card to `folder`, whole or not at all.

    facts: what the card says of the training, by name.
    """
    staging = folder.with_name(f".{folder.name}.incomplete")
    shutil.rmtree(staging, ignore_errors=True)
    stock = stock_model(model)
    stock.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    (staging / "README.md").write_text(model_card(model, stock, facts or {}), encoding="utf-8")
    if folder.exists():
        shutil.rmtree(folder)
    staging.rename(folder)
    return folder


def model_card(model: PretrainingModel, stock: PreTrainedModel, facts: dict[str, Any]) -> str:
    """The README.md of an exported encoder: how it was trained, how to load it, what it cannot do."""
    auto = "AutoModelForMaskedLM" if keeps_head(model) else "AutoModel"
    lines = [
        "---",
        "library_name: transformers",
        "tags: [unmask, encoder, masked-language-modeling]",
        *(["pipeline_tag: fill-mask"] if keeps_head(model) else ["pipeline_tag: feature-extraction"]),
        "---",
        "",
        f"# {type(stock).__name__} pretrained with unmask",
        "",
        "```python",
        f"from transformers import {auto}, AutoTokenizer",
        "",
        f'model = {auto}.from_pretrained("path/to/this/folder")',
        'tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")',
        "```",
        "",
    ]
    if model.objective.encoder_states == 0:
        lines += [
            "**This encoder takes no `[MASK]`.** It was pretrained by an objective that keeps `[MASK]` out of it (a"
            " decoder, not part of this checkpoint, made the predictions), so the `[MASK]` embedding means nothing to"
            " it. Fine-tune it, or use its hidden states; it does not fill masks.",
            "",
        ]
    if model.objective.encoder_states > 1:
        lines += [
            "**A single `[MASK]` means little to this encoder.** It was pretrained with "
            f"{model.objective.encoder_states} states for each `[MASK]`, which are not part of this checkpoint. "
            "Fine-tune it, or use its hidden states; it does not fill masks.",
            "",
        ]
    if any("pooler" in name for name, _ in AutoModel.from_config(model.config.encoder).named_parameters()):
        lines += ["The pooler of this class is untrained: pretraining had no task for it.", ""]
    lines += ["## Training", "", "| | |", "|---|---|"]
    objective = {key: value for key, value in model.objective.to_dict().items() if value is not None}
    for key, value in {**facts, **objective, "max_length": model.config.max_length}.items():
        text = str(value).replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| {key} | {text} |")
    return "\n".join(lines) + "\n"
