"""What is trained on what (`RunArguments`) and how (`PretrainingArguments`): flags, recipe keys, Python keywords."""

import dataclasses
import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from transformers import TrainingArguments

from unmask.devices import trainer_defaults
from unmask.errors import UserError, nearest
from unmask.objectives import FIELDS

PRESETS: dict[str, dict[str, Any]] = {
    # model ------------------------------------------------------------------- | data and optimisation
    "tiny": {
        **{"num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "vocab_size": 8192},
        **{"max_length": 128, "per_device_train_batch_size": 32, "learning_rate": 1e-3},
    },
    "small": {
        **{"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 32768},
        **{"max_length": 128, "per_device_train_batch_size": 64, "learning_rate": 5e-4},
    },
    "base": {
        **{"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "vocab_size": 32768},
        **{"max_length": 512, "per_device_train_batch_size": 32, "learning_rate": 3e-4},
    },
    "large": {
        **{"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 32768},
        **{"max_length": 512, "per_device_train_batch_size": 16, "learning_rate": 2e-4},
    },
}
"""Sizes by name: tiny for a laptop, small as BERT-small, base as BERT-base, large as BERT-large."""

SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads")
MODEL_FIELDS = (*SIZES, "vocab_size", "max_length")


def _flag(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class RunArguments:
    """What is trained on what."""

    objective: str = _flag(
        "mlm", "The pretraining objective, one of `unmask objectives`: mlm, mae-lm, exlm, mae-exlm, ..."
    )
    set: list[str] = field(
        default_factory=list,
        metadata={"help": "Fields of the objective to change, as in --set mask_ratio=0.3 mask_unit=word."},
    )
    data: list[str] | None = field(
        default=None,
        metadata={
            "help": "Corpus: text, JSONL, CSV, TSV or Parquet files (also .gz, .zst), globs, folders, folders saved by "
            "datasets, or a Hub name. Without it: English built from the documentation of installed packages."
        },
    )
    text_column: str | None = _flag(None, "Column that holds the text; found if there is only one candidate.")
    sample_by: str = _flag("auto", "What a document is in text files: line, paragraph, document, or auto.")
    packing: str = _flag("blocks", "blocks: documents joined and cut to full length; rows: one sequence per document.")
    eval_data: list[str] | None = field(default=None, metadata={"help": "Corpus for evaluation, given like --data."})
    eval_fraction: float = _flag(0.01, "Without --eval_data: share of the corpus set aside, whole documents; 0: none.")
    max_eval_samples: int | None = _flag(None, "Evaluate on the first so many sequences of the evaluation split.")
    tokenizer: str | None = _flag(
        None, "Tokenizer folder or Hub name. Default: the encoder's own, or a BPE trained on the corpus."
    )
    preset: str = _flag("tiny", "Size of a new encoder and its defaults: tiny, small, base or large.")
    encoder: str | None = _flag(None, "Continue from this checkpoint (folder or Hub name) instead of a new encoder.")
    model_type: str = _flag("modernbert", "Architecture of a new encoder, by its name in transformers.")
    config_overrides: list[str] = field(
        default_factory=list,
        metadata={"help": "Fields of a new encoder's config, as in --config_overrides num_hidden_layers=6."},
    )
    num_hidden_layers: int | None = _flag(None, "Layers of a new encoder (preset).")
    hidden_size: int | None = _flag(None, "Width of a new encoder (preset).")
    num_attention_heads: int | None = _flag(None, "Attention heads of a new encoder (preset).")
    vocab_size: int | None = _flag(None, "Vocabulary of a tokenizer trained on the corpus (preset).")
    max_length: int | None = _flag(None, "Tokens of a sequence with its boundary tokens (preset).")
    cache_dir: str | None = _flag(None, "Where tokenised corpora are kept. Default: $UNMASK_CACHE or ~/.cache/unmask.")
    trust_remote_code: bool = _flag(False, "Run code that a Hub repository brings along.")
    overwrite: bool = _flag(False, "Replace the run that output_dir holds.")

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise UserError(f"There is no preset '{self.preset}': {nearest(self.preset, PRESETS)}")
        if self.packing not in ("blocks", "rows"):
            raise UserError(f"packing is '{self.packing}': {nearest(self.packing, ('blocks', 'rows'))}")
        if not 0 <= self.eval_fraction < 1:
            raise UserError(f"eval_fraction is {self.eval_fraction}, but must lie in [0, 1), for example 0.01.")
        for name in MODEL_FIELDS:
            if self.encoder is not None and name in SIZES:
                if getattr(self, name) is not None:
                    raise UserError(
                        f"{name} is the size of a new encoder, but '{self.encoder}' has its own: leave it out."
                    )
            elif getattr(self, name) is None:
                setattr(self, name, PRESETS[self.preset][name])
        if self.encoder is not None and self.config_overrides:
            raise UserError(
                f"config_overrides are for a new encoder, but '{self.encoder}' has its own: leave them out."
            )
        if self.max_length is not None and self.max_length < 8:
            raise UserError(f"max_length is {self.max_length}, but a sequence needs at least 8 tokens.")


@dataclass
class PretrainingArguments(TrainingArguments):
    """`transformers.TrainingArguments` with the defaults of masked pretraining."""

    output_dir: str | None = _flag(None, "The run's folder: config.yaml, checkpoints, encoder/, metrics.json, logs.")
    per_device_train_batch_size: int = _flag(32, "Sequences of a step on each device (preset).")
    per_device_eval_batch_size: int = _flag(64, "Sequences of an evaluation batch.")
    learning_rate: float = _flag(5e-4, "Peak learning rate (preset).")
    warmup_steps: float = _flag(0.1, "Steps, or share of the steps, over which the learning rate rises.")
    weight_decay: float = _flag(0.01, "Weight decay of AdamW, not on biases and norms.")
    adam_beta2: float = _flag(0.98, "Second moment's decay (RoBERTa's value, which both papers use).")
    adam_epsilon: float = _flag(1e-6, "AdamW's epsilon (RoBERTa's value, which both papers use).")
    max_steps: int = _flag(-1, "Optimizer steps; by default num_train_epochs decides.")
    logging_steps: float = _flag(50, "Log every so many steps (below 1: share of the steps).")
    eval_strategy: str = _flag("steps", "When to evaluate: steps, epoch or no.")
    eval_steps: float | None = _flag(0.1, "Evaluate every so many steps (below 1: share of the steps).")
    save_steps: float = _flag(0.1, "Save every so many steps (below 1: share of the steps).")
    save_total_limit: int | None = _flag(2, "Checkpoints to keep.")
    bf16: bool | None = _flag(None, "bfloat16 autocast. Default: where the hardware computes in it.")
    logging_nan_inf_filter: bool = _flag(False, "Leave losses that are not finite out of what is logged.")
    torch_compile: bool = _flag(False, "Compile each layer of encoder and decoder: for long runs (docs/speed.md).")
    disable_tqdm: bool | None = _flag(False, "No progress bars.")
    report_to: None | str | list[str] = _flag("tensorboard", "Where curves are logged.")
    resume_from_checkpoint: str | None = _flag(
        None, "Go on from the newest complete checkpoint of output_dir (`latest`), or from the one named."
    )

    def __post_init__(self) -> None:
        for name, value in trainer_defaults(self.bf16, self.fp16).items():
            setattr(self, name, value)
        # The trainer compiles layer by layer: without a backend named here, accelerate does not compile the whole.
        compiled, self.torch_compile = self.torch_compile, False
        super().__post_init__()
        self.torch_compile = compiled


def parse_pairs(pairs: list[str] | dict[str, Any], flag: str) -> dict[str, Any]:
    """`["field=value", ...]` or a mapping -> dict. Raises `UserError` for anything without `=`."""
    if isinstance(pairs, dict):
        return dict(pairs)
    for pair in pairs:
        if "=" not in pair:
            raise UserError(f"'{pair}' after {flag} is not a field: write it as field=value.")
    return dict(pair.split("=", 1) for pair in pairs)


def read_recipe(path: str) -> list[str]:
    """A recipe as flags, so that its values are read as theirs are. Raises `UserError` if it cannot be read."""
    try:
        recipe = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"The recipe '{path}' cannot be read ({reason}): give a YAML file of flags.") from error
    if not isinstance(recipe, dict):
        raise UserError(f"The recipe '{path}' holds no mapping: write one `flag: value` a line.")
    flags: list[str] = []
    for name, value in recipe.items():
        if isinstance(value, dict):
            value = json.dumps(value)
        if value is not None and value != []:
            flags += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return flags


def build_arguments(values: dict[str, Any]) -> tuple[RunArguments, PretrainingArguments]:
    """Both sets of arguments from plain values; what is not given comes from the preset, then from the defaults.

    Raises `UserError` for a name that is no argument, or a value that its argument cannot take.
    """
    run_names, training_names = ({f.name for f in dataclasses.fields(c)} for c in (RunArguments, PretrainingArguments))
    for name in values:
        if name not in run_names | training_names:
            raise UserError(unknown_argument(name, run_names | training_names))
    run = RunArguments(**{k: v for k, v in values.items() if k in run_names})
    preset = {k: v for k, v in PRESETS[run.preset].items() if k in training_names}
    training = {k: v for k, v in values.items() if k in training_names}
    if not training.get("output_dir"):
        raise UserError("No output_dir is given: say where the run goes, for example --output_dir runs/mine.")
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
        if training.get(name, 1) < 1:
            raise UserError(f"{name} is {training[name]}, but must be at least 1.")
    if training.get("max_steps") == 0:
        raise UserError("max_steps is 0: give the steps to train, or leave it out to train for num_train_epochs.")
    try:
        return run, PretrainingArguments(**{**preset, **training})
    except (ValueError, TypeError, ImportError) as error:
        raise UserError(f"The training arguments do not fit together: {' '.join(str(error).split())}") from error


def unknown_argument(name: str, known: set[str]) -> str:
    """The sentence that refuses an unknown argument, with the nearest known one."""
    if name in FIELDS:
        return f"'{name}' is a field of the objective: write it as --set {name}=..."
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"There is no argument '{name}'" + (f": did you mean '{close[0]}'?" if close else ": see --help for all.")


def to_recipe(run: RunArguments, args: PretrainingArguments, given: Iterable[str]) -> dict[str, Any]:
    """Everything needed to run it again: all of `RunArguments`, what was given of the training arguments, the preset's.

    It makes no second arguments to compare with: they would reset accelerate's state, and with it each process's rank.
    """
    recipe = {f.name: getattr(run, f.name) for f in dataclasses.fields(run) if f.name != "overwrite"}
    if run.data is not None and not isinstance(run.data, list | str):
        recipe["data"] = f"{type(run.data).__name__} given from Python"
    wanted = {"output_dir", "seed", "bf16", "max_steps", *PRESETS[run.preset], *given} - {"resume_from_checkpoint"}
    for f in dataclasses.fields(PretrainingArguments):
        value = getattr(args, f.name)
        value = getattr(value, "value", value)  # enumerations
        if f.name in wanted and f.init and (value is None or isinstance(value, bool | int | float | str)):
            recipe[f.name] = value
    return {name: value for name, value in recipe.items() if value is not None and value != []}
