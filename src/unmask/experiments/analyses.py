"""What `unmask analyze` runs: each analysis of several models, its table, its files."""

import dataclasses
import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from unmask.analysis import entropy as of_entropy
from unmask.analysis import lattice as of_lattice
from unmask.analysis import rank as of_rank
from unmask.analysis.report import build, rank_figure
from unmask.data.corpus import open_corpus
from unmask.data.packing import sequences
from unmask.data.tokenizers import load_tokenizer
from unmask.errors import UserError
from unmask.files import write_whole
from unmask.modeling.pretraining import PretrainingModel
from unmask.modeling.stock import Encoder
from unmask.objectives import get_objective
from unmask.training.trainer import find_checkpoint


def rank(names: Sequence[str], args: Namespace) -> list[of_rank.RankAnalysis]:
    """Ranks of each model; prints a table, writes rank.json and rank.svg."""
    texts = _texts(args)
    found = []
    for name in names:
        encoder = Encoder(name, args.trust_remote_code)
        settings = {
            key: getattr(args, key) for key in ("tau", "centred", "max_tokens", "max_length", "batch_size", "seed")
        }
        found.append(of_rank.analyse(encoder, texts, **settings))
    table = Table(title=f"Effective rank (τ = {args.tau:g}) ± 1.96 standard errors, {found[0].tokens:,} tokens")
    for column in ("model", "layer", "real tokens, no [MASK]", "real tokens", "[MASK]", "of", "[MASK] unused"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for each in found:
        for layer, row in enumerate(each.layers):
            cells = [
                f"{row[k]['effective_rank']} ± {1.96 * row[k]['standard_error']:.1f}" for k in ("plain", "real", "mask")
            ]
            unused = f"{row['overlap']['unused_variance']:.1%}"
            table.add_row(each.model if layer == 0 else "", str(layer), *cells, str(row["size"]), unused)
    Console().print(table)
    for each in found:
        Console(highlight=False).print(escape(of_rank.verdict(each)), soft_wrap=True)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    write_whole(args.output_dir / "rank.json", json.dumps([dataclasses.asdict(each) for each in found], indent=1))
    rank_figure(found).savefig(args.output_dir / "rank.svg")
    Console().print(f"{args.output_dir / 'rank.svg'}, {args.output_dir / 'rank.json'}", soft_wrap=True)
    return found


def entropy(names: Sequence[str], args: Namespace) -> dict[str, dict[str, Any]]:
    """Entropies of each model's predictions; prints a table, writes entropy.json."""
    texts = _texts(args)
    found = {}
    for name in names:
        model, tokenizer = predictor(name, args.max_length, args.trust_remote_code)
        length = min(args.max_length, model.config.max_length)
        rows = _Rows(sequences(texts, tokenizer, length, args.max_sequences))
        found[name] = of_entropy.analyse(model, tokenizer, rows, max_sequences=args.max_sequences, seed=args.seed)
    table = Table(title="Predictions at masked positions, in nats; ± standard error over sequences")
    columns = ("entropy", "top1", "top5", "loss", "accuracy", "state_entropy", "states_used", "at_own_position")
    for column in ("model", "masked", *columns):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, each in found.items():
        for number, (ratio, row) in enumerate(each["by_ratio"].items()):
            values = [f"{row[c]:.3f}" if c in row else "" for c in columns]
            values[0] += f" ± {row['entropy_error']:.3f}"
            table.add_row(name if number == 0 else "", f"{float(ratio):.0%}", *values)
    console = Console()
    console.width = max(console.width, 130)
    console.print(table)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    write_whole(args.output_dir / "entropy.json", json.dumps(found, indent=1))
    Console().print(f"By frequency and by part of the sequence: {args.output_dir / 'entropy.json'}", soft_wrap=True)
    return found


def lattice(names: Sequence[str], args: Namespace) -> None:
    """The lattice of one run on one text (`names` holds both), as a picture."""
    if len(names) != 2:
        raise UserError("A lattice is that of one run and one text: `unmask analyze lattice RUN 'some [MASK] text'`.")
    model, tokenizer = predictor(names[0], args.max_length, args.trust_remote_code)
    path = args.output or args.output_dir / "lattice.svg"
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise UserError(f"output is '{path}', but a picture's name ends in .svg, .png or .pdf.")
    found = of_lattice.lattice(model, tokenizer, names[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    of_lattice.draw(found, path)
    Console().print(f"States, transitions and the best path: {path}", soft_wrap=True)


def report(names: Sequence[str], args: Namespace) -> None:
    """All analyses of all models as one HTML file; what a model does not have is left out and said."""
    ranks = rank(names, args)
    predicting, lattices = [], {}
    for name in names:
        try:
            model, tokenizer = predictor(name, args.max_length, args.trust_remote_code)
        except NoHead as error:
            Console().print(f"Left out: {error}", soft_wrap=True)
            continue
        predicting.append(name)
        if args.text and model.objective.aligned:
            lattices[name] = of_lattice.lattice(model, tokenizer, args.text)
    entropies = entropy(predicting, args) if predicting else {}
    corruption = None
    if args.corruption:
        try:
            corruption = json.loads(args.corruption.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"'{args.corruption}' cannot be read ({error}): give corruption.json.") from error
    path = args.output or args.output_dir / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, build(ranks, entropies, lattices, corruption))
    Console().print(f"Report: {path}", soft_wrap=True)


class NoHead(UserError):
    """A model that predicts nothing at masked positions."""


def predictor(name: str, max_length: int, trust_remote_code: bool = False) -> tuple[PretrainingModel, Any]:
    """What predicts at masked positions: a run's newest checkpoint, or a stock masked language model; and a tokenizer.

    Raises `NoHead` for a model without a head for that.
    """
    if Path(name).is_dir() and (Path(name, "config.yaml").is_file() or Path(name, "complete.json").is_file()):
        checkpoint = find_checkpoint(Path(name))
        return PretrainingModel.from_pretrained(checkpoint), load_tokenizer(str(checkpoint))
    tokenizer = load_tokenizer(name, trust_remote_code)
    encoder = Encoder(name, trust_remote_code)
    model = PretrainingModel.from_encoder(
        encoder.path,
        get_objective("mlm"),
        mask_token_id=tokenizer.mask_token_id,
        max_length=encoder.max_length(max_length),
        trust_remote_code=trust_remote_code,
    )
    if model.has_new_head:
        raise NoHead(
            f"'{name}' holds no head that predicts at masked positions: give a run, or a masked language model."
        )
    return model, tokenizer


class _Rows:
    """Sequences that are held, as `MaskedRows` takes them."""

    def __init__(self, rows: Any) -> None:
        self.rows = list(rows)
        self.lengths = np.array([len(row) for row in self.rows])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        return self.rows[row]


def _texts(args: Namespace) -> Any:
    if not args.data:
        raise UserError("No text is given: name files, a folder or a Hub data set with --data.")
    return open_corpus(args.data, text_column=args.text_column)
