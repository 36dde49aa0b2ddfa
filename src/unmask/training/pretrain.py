"""One run from a corpus to a stock encoder: corpus -> blocks -> masked batches -> model -> checkpoints -> encoder/."""

import contextlib
import json
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedTokenizerBase, set_seed

from unmask import __version__
from unmask.data.corpus import Corpus, open_corpus
from unmask.data.documentation import documentation
from unmask.data.masking import SequenceRows
from unmask.data.packing import Blocks, Rows, Tokens, default_cache_dir, tokenize
from unmask.data.tokenizers import boundaries, load_tokenizer, train_tokenizer
from unmask.errors import UserError, nearest
from unmask.files import write_whole
from unmask.modeling.export import export
from unmask.modeling.pretraining import PretrainingConfig, PretrainingModel
from unmask.objectives import AT_EQUAL_COST, Objective, get_objective, objective_from_dict
from unmask.training.arguments import (
    PretrainingArguments,
    RunArguments,
    build_arguments,
    parse_pairs,
    to_recipe,
)
from unmask.training.trainer import PretrainingTrainer, find_checkpoint, newest_complete, training_seconds

logger = logging.getLogger("unmask")


def pretrain(**values: Any) -> dict[str, Any]:
    """Pretrain an encoder; keywords are the flags of `unmask pretrain`, and `data` may be a `datasets.Dataset`.

    Returns what `metrics.json` of the run folder holds; losses in nats per target token. Raises `UserError`.
    """
    run, args = build_arguments(values)
    if run.encoder is not None and Path(run.encoder, "config.yaml").is_file():
        raise UserError(f"'{run.encoder}' is a run's folder: its encoder is '{Path(run.encoder, 'encoder')}'.")
    if run.objective == AT_EQUAL_COST:
        raise UserError(
            f"How many steps {AT_EQUAL_COST} trains depends on another objective's cost: use `unmask compare exlm "
            f"{AT_EQUAL_COST}`, or mlm with a max_steps of your own."
        )
    objective = get_objective(run.objective, **parse_pairs(run.set, "--set"))
    output = Path(args.output_dir or "")
    checkpoint = _checkpoint_to_resume(output, args)
    if checkpoint is None and not args.resume_from_checkpoint:
        _refuse_occupied(output, run.overwrite)
    finished = checkpoint is not None and 0 < args.max_steps <= _step_of(checkpoint)
    if finished and (output / "metrics.json").is_file() and (output / "encoder").is_dir():
        logger.warning("%s is finished: to train on, raise --max_steps.", output)
        return json.loads((output / "metrics.json").read_text(encoding="utf-8"))
    set_seed(args.seed)

    tokenizer, train_tokens, eval_tokens = _open_data(run, objective.aligned)
    train_rows = _rows(train_tokens, run, copies=objective.repeat)
    eval_rows = None if eval_tokens is None else _rows(eval_tokens, run, run.max_eval_samples)
    model = _new_model(run, objective, tokenizer)
    if checkpoint is not None:
        _refuse_other_model(checkpoint, model)
    elif model.has_new_head:
        if run.encoder is not None:
            logger.warning("'%s' holds no MLM head: a new one is trained.", run.encoder)
        model.head.start_at(_log_frequencies(train_tokens, len(tokenizer)))
    if eval_rows is None:
        args.eval_strategy = "no"
    recipe = to_recipe(run, args, values)
    trainer = PretrainingTrainer(model, args, train_rows, eval_rows, tokenizer)
    trainer.accelerator.wait_for_everyone()  # every process has looked at the folder before one writes to it
    if trainer.args.should_save:
        if not args.resume_from_checkpoint:
            _clear(output)
        output.mkdir(parents=True, exist_ok=True)
        write_whole(output / "config.yaml", yaml.safe_dump(recipe, sort_keys=False))
    if finished:  # but stopped before its results were written
        trainer.restore(str(checkpoint))
    else:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if newest_complete(output) is None:  # save_strategy=no
        trainer._save_checkpoint(trainer.model, None)
    metrics = _evaluate(trainer, run, train_tokens)  # by all processes together
    if trainer.args.should_save:
        write_whole(output / "metrics.json", json.dumps(metrics, indent=2))
        export(model, tokenizer, output / "encoder", training_facts(output))
        _summary(metrics, output)
    trainer.accelerator.wait_for_everyone()
    return metrics


def training_facts(run: Path) -> dict[str, Any]:
    """What a model card says of the training: the run's metrics.json and the main lines of its config.yaml."""
    facts: dict[str, Any] = {}
    if (run / "metrics.json").is_file():
        facts |= json.loads((run / "metrics.json").read_text(encoding="utf-8"))
    if (run / "config.yaml").is_file():
        recipe = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
        names = ("learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "packing", "encoder")
        facts |= {name: recipe[name] for name in names if name in recipe}
    return {name: value for name, value in facts.items() if value is not None}


def _checkpoint_to_resume(output: Path, args: PretrainingArguments) -> Path | None:
    wanted = args.resume_from_checkpoint
    if not wanted:
        return None
    if wanted.lower() not in ("latest", "true"):
        return find_checkpoint(Path(wanted))
    found = newest_complete(output)
    if found is None:
        logger.warning("%s holds no complete checkpoint yet: training starts from the beginning.", output)
    return found


def _step_of(checkpoint: Path) -> int:
    return json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["global_step"]


def _refuse_other_model(checkpoint: Path, model: PretrainingModel) -> None:
    saved = PretrainingConfig.from_pretrained(checkpoint)
    trained = objective_from_dict(saved.objective).to_dict()
    for name, value in model.objective.to_dict().items():
        if trained[name] != value:
            raise UserError(
                f"'{checkpoint}' was trained with another {name} ({trained[name]}, here {value}): resume it with its "
                "own config.yaml."
            )
    ours, theirs = (c.encoder.to_dict() for c in (model.config, saved))
    differ = [name for name in ours if ours[name] != theirs.get(name) and name not in ("dtype", "transformers_version")]
    if differ:
        raise UserError(
            f"'{checkpoint}' holds an encoder with another {differ[0]} ({theirs.get(differ[0])}, here "
            f"{ours[differ[0]]}): resume it with its own config.yaml."
        )


def _refuse_occupied(output: Path, overwrite: bool) -> None:
    """Refuses an output folder that holds something else."""
    if output.is_file():
        raise UserError(f"output_dir '{output}' is a file: give a folder.")
    if (output / "config.yaml").exists():
        if not overwrite:
            raise UserError(
                f"output_dir '{output}' already holds a run: choose another folder, go on with "
                "--resume_from_checkpoint latest, or replace it with --overwrite."
            )
    elif output.is_dir() and any(output.iterdir()):
        raise UserError(f"output_dir '{output}' is not empty and holds no run: choose a new or an empty folder.")


def _clear(output: Path) -> None:
    """Removes the run that the folder holds, and nothing else."""
    for old in [*output.glob("checkpoint-*"), output / "encoder", output / "runs", output / ".incomplete"]:
        shutil.rmtree(old, ignore_errors=True)
    for name in ("config.yaml", "metrics.json"):
        (output / name).unlink(missing_ok=True)


def _open_data(run: RunArguments, aligned: bool) -> tuple[PreTrainedTokenizerBase, Tokens, Tokens | None]:
    """Tokenizer, training tokens and evaluation tokens; aligned: whether boundary tokens are needed."""
    corpus = documentation() if run.data is None else _open(run.data, run)
    eval_corpus = None if run.eval_data is None else _open(run.eval_data, run)
    cache = Path(run.cache_dir) if run.cache_dir else default_cache_dir()
    name = run.tokenizer or run.encoder
    if name is None:
        assert run.vocab_size is not None
        name = str(_trained_tokenizer(corpus, run.vocab_size, cache))
    tokenizer = load_tokenizer(name, trust_remote_code=run.trust_remote_code)
    if aligned and None in boundaries(tokenizer):
        raise UserError(
            f"The tokenizer '{name}' puts no boundary tokens around a sequence, and state alignment begins and ends at "
            "them: use a tokenizer with [CLS] and [SEP] (or BOS and EOS), or an objective with one state."
        )
    assert run.max_length is not None
    tokenizer.model_max_length = run.max_length
    tokens = tokenize(corpus, tokenizer, cache)
    if eval_corpus is not None:
        return tokenizer, tokens, tokenize(eval_corpus, tokenizer, cache)
    if run.eval_fraction == 0:
        return tokenizer, tokens, None
    return tokenizer, *tokens.split(run.eval_fraction, seed=0)  # one split for all seeds, so that runs compare


def _trained_tokenizer(corpus: Corpus, vocab_size: int, cache: Path) -> Path:
    """A BPE trained on the corpus, once."""
    folder = cache / f"bpe-{vocab_size}-{corpus.fingerprint}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=cache) as scratch:
            train_tokenizer(corpus, "bpe", vocab_size).save_pretrained(Path(scratch, "whole"))
            with contextlib.suppress(OSError):  # another process was first
                Path(scratch, "whole").rename(folder)
    return folder


def _open(data: Any, run: RunArguments) -> Corpus:
    return open_corpus(data, text_column=run.text_column, sample_by=run.sample_by)


def _rows(tokens: Tokens, run: RunArguments, limit: int | None = None, copies: int = 1) -> SequenceRows:
    """Rows of which `copies` copies of each token, boundaries apart, are max_length tokens."""
    assert run.max_length is not None
    ends = 2 - (tokens.start, tokens.end).count(None)
    rows = (Blocks if run.packing == "blocks" else Rows)(tokens, (run.max_length - ends) // copies + ends)
    if len(rows) == 0:
        raise UserError("No sequence of the corpus is long enough to mask anything: give longer or more documents.")
    return rows if limit is None else _First(rows, limit)


class _First:
    """The first rows of others."""

    def __init__(self, rows: SequenceRows, limit: int) -> None:
        self.rows, self.lengths = rows, rows.lengths[:limit]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> np.ndarray:
        return self.rows[row]


def _new_model(run: RunArguments, objective: Objective, tokenizer: PreTrainedTokenizerBase) -> PretrainingModel:
    assert run.max_length is not None
    shared: dict[str, Any] = {
        "mask_token_id": tokenizer.mask_token_id,
        "blank_token_id": tokenizer.unk_token_id,
        "max_length": run.max_length,
    }
    if run.encoder is not None:
        return PretrainingModel.from_encoder(
            run.encoder,
            objective,
            vocab_size=len(tokenizer),
            trust_remote_code=run.trust_remote_code,
            **shared,
        )
    config = PretrainingConfig(encoder=new_encoder_config(run, tokenizer), objective=objective.to_dict(), **shared)
    return PretrainingModel(config)


def new_encoder_config(run: RunArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """The config of a new encoder of the preset's size. Raises `UserError` for an unknown architecture or field."""
    if run.model_type not in CONFIG_MAPPING:
        raise UserError(f"transformers has no model_type '{run.model_type}': {nearest(run.model_type, CONFIG_MAPPING)}")
    assert run.hidden_size is not None
    assert run.max_length is not None
    start, end = boundaries(tokenizer)
    assert run.num_attention_heads is not None
    if run.hidden_size % run.num_attention_heads:
        raise UserError(
            f"hidden_size={run.hidden_size} does not divide among {run.num_attention_heads} attention heads: choose a "
            f"multiple of {run.num_attention_heads}."
        )
    rope = {"rope_type": "default", "rope_theta": rotary_base(run.hidden_size // run.num_attention_heads)}
    values: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": run.hidden_size,
        "num_hidden_layers": run.num_hidden_layers,
        "num_attention_heads": run.num_attention_heads,
        "intermediate_size": 4 * run.hidden_size,
        # RoBERTa-like tables begin after the padding index.
        "max_position_embeddings": run.max_length + tokenizer.pad_token_id + 1,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": start,
        "eos_token_id": end,
        "tie_word_embeddings": True,
        # 0.02 at BERT-base's width; with 0.02 a narrow encoder stays at the unigram loss far longer (docs/design.md).
        "initializer_range": round(0.02 * (768 / run.hidden_size) ** 0.5, 4),
    }
    match run.model_type:
        case "modernbert":  # every layer sees the whole sequence; gated feed-forward with as many weights as 4 x width
            values |= {
                "layer_types": ["full_attention"] * (run.num_hidden_layers or 0),
                "rope_parameters": {"full_attention": {**rope}, "sliding_attention": {**rope}},
                "intermediate_size": -(-8 * run.hidden_size // 3 // 64) * 64,
                "cls_token_id": start,
                "sep_token_id": end,
            }
        case "mpnet":
            values["max_position_embeddings"] = run.max_length + 2  # whatever the padding index
        case "electra":
            values["embedding_size"] = run.hidden_size
        case "nomic_bert":
            values["rope_parameters"] = rope
        case "eurobert":
            values |= {"rope_parameters": rope, "mask_token_id": tokenizer.mask_token_id}
        case "esm":
            values |= {
                "rope_theta": rope["rope_theta"],
                "position_embedding_type": "rotary",
                "token_dropout": False,
                "mask_token_id": tokenizer.mask_token_id,
            }
    config_class = CONFIG_MAPPING[run.model_type]
    overrides = parse_pairs(run.config_overrides, "--config_overrides")
    known = set(config_class().to_dict())
    for name, value in overrides.items():
        if name not in known:
            raise UserError(f"{config_class.__name__} has no field '{name}': {nearest(name, known)}")
        values[name] = yaml.safe_load(value) if isinstance(value, str) else value
    try:
        return config_class(**values)
    except (ValueError, TypeError) as error:
        raise UserError(f"{config_class.__name__} refuses these values: {' '.join(str(error).split())}") from error


def rotary_base(head_size: int) -> float:
    """θ of a new encoder: 10,000 as in both papers for heads of 64 and more, 10,000^(head size / 64) for smaller ones.

    So the frequencies of small heads stand as close together as those of the papers', and reach as many positions of a
    short sequence; 2-D positions have only half of them (docs/design.md).
    """
    return 10_000.0 ** min(1.0, head_size / 64)


def _evaluate(trainer: PretrainingTrainer, run: RunArguments, train_tokens: Tokens) -> dict[str, Any]:
    """What `metrics.json` holds."""
    last = [log for log in trainer.state.log_history if log["step"] == trainer.state.global_step and "eval_loss" in log]
    scores = {} if trainer.eval_dataset is None else last[-1] if last else trainer.evaluate()
    names = ("eval_loss", "eval_token_loss", "eval_joint_loss", "eval_accuracy")
    return {
        "objective": run.objective,
        "steps": trainer.state.global_step,
        "tokens": trainer.state.num_input_tokens_seen,
        "training_seconds": training_seconds(trainer.state),
        "training_flops": trainer.state.total_flos,
        **{name: scores.get(name) for name in names},
        "unigram_loss": _unigram_loss(trainer, train_tokens),
        "tokens_per_second": trainer.tokens_per_second,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "encoder_parameters": sum(p.numel() for p in trainer.model.encoder.parameters()),
        "seed": trainer.args.seed,
        "unmask": __version__,
    }


def _unigram_loss(trainer: PretrainingTrainer, train_tokens: Tokens) -> float | None:
    """Cross-entropy, in nats, of the masked evaluation targets under the training split's token frequencies.

    A target that training never saw costs a finite amount.
    """
    if trainer.eval_dataset is None:
        return None
    logs = _log_frequencies(train_tokens, len(trainer.processing_class))
    rows = trainer.eval_dataset
    inner = slice(1, -1) if rows.expand_anchors else slice(None)  # boundary tokens are no targets of evaluation
    targets = np.concatenate([rows[i]["labels"][inner] for i in range(len(rows))])
    return float(-logs[targets].mean())


def _log_frequencies(tokens: Tokens, vocab_size: int) -> np.ndarray:
    """log of each token's share of the corpus, float64 [V]; one is added to every count."""
    counts = tokens.counts(vocab_size) + 1.0
    return np.log(counts / counts.sum())


def _summary(metrics: dict[str, Any], output: Path) -> None:
    table = Table(title=f"{metrics['objective']}: {output}", show_header=False)
    for name in (
        "steps",
        "tokens",
        "eval_token_loss",
        "unigram_loss",
        "eval_accuracy",
        "tokens_per_second",
        "parameters",
    ):
        value = metrics[name]
        text = "no evaluation split" if value is None else f"{value:.4g}" if 0 < abs(value) < 100 else f"{value:,.0f}"
        table.add_row(name, text)
    table.add_row("encoder", str(output / "encoder"))
    Console().print(table)
