"""The command line: unmask objectives | tokenizer | pretrain | compare | fill | export | evaluate | analyze."""

import argparse
import ctypes
import itertools
import logging
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from unmask.errors import UserError, nearest

EXAMPLES = """
examples:
  unmask pretrain --objective mae-lm --data corpus.txt --preset tiny --output_dir runs/mae --max_steps 2000
  unmask pretrain recipes/mae-lm-tiny.yaml --learning_rate 5e-4
  unmask pretrain --objective mae-lm --encoder path-or-hub-name --data corpus.txt --output_dir runs/more
  unmask pretrain runs/mae/config.yaml --resume_from_checkpoint latest

Every flag of transformers.TrainingArguments is accepted; the most useful ones are listed.
A recipe is a YAML file of the same names; flags override it.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[0].upper()}{message[1:]} (see `{self.prog} --help`).")


def _pretraining_values(usage: str, flags: list[str], description: str) -> dict[str, Any]:
    """The flags that were given, as values of `RunArguments` and `PretrainingArguments`."""
    import dataclasses

    from transformers import HfArgumentParser

    from unmask.training.arguments import PretrainingArguments, RunArguments, unknown_argument

    class Parser(HfArgumentParser):
        error = _Parser.error

    parser = Parser(
        (RunArguments, PretrainingArguments),
        prog=" ".join(usage.split()[:2]),
        usage=f"{usage} [--flag value ...]",
        description=description,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    listed = set(RunArguments.__annotations__) | set(PretrainingArguments.__annotations__)
    listed |= {"gradient_accumulation_steps", "num_train_epochs", "lr_scheduler_type", "seed", "max_grad_norm"}
    listed |= {"dataloader_num_workers", "gradient_checkpointing", "torch_compile", "use_cpu", "help"}
    for action in parser._actions:
        if action.dest != "help":
            action.default = argparse.SUPPRESS  # what is not given comes from the preset
        if action.dest == "resume_from_checkpoint":
            action.nargs, action.const = "?", "latest"
        if action.dest not in listed or any(flag.startswith("--no_") for flag in action.option_strings):
            action.help = argparse.SUPPRESS
        elif action.help:
            action.help = action.help.replace("%", "%%")
    given, unknown = parser.parse_known_args(flags)
    if unknown:
        known = {f.name for c in (RunArguments, PretrainingArguments) for f in dataclasses.fields(c)}
        raise UserError(unknown_argument(unknown[0].lstrip("-").split("=")[0], known))
    return vars(given)


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """The words before the first flag, and the rest."""
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    return words, argv[len(words) :]


def _pretrain(argv: list[str]) -> None:
    recipes, flags = _split(argv)
    if len(recipes) > 1:
        raise UserError(f"'{recipes[1]}' is one recipe too many: give one YAML file, and flags after it.")
    for recipe in recipes:
        from unmask.training.arguments import read_recipe

        flags = [*read_recipe(recipe), *flags]
    description = "Pretrain an encoder, new or from a checkpoint; a stock transformers encoder comes out."
    values = _pretraining_values("unmask pretrain [RECIPE.yaml]", flags, description)
    _quiet()
    from unmask.training.pretrain import pretrain

    pretrain(**values)


def _compare(argv: list[str]) -> None:
    objectives, flags = _split(argv)
    description = "The same data and steps under several objectives, side by side."
    values = _pretraining_values("unmask compare OBJECTIVE OBJECTIVE ...", flags, description)
    _quiet()
    from unmask.experiments.compare import compare

    compare(objectives, **values)


def _tokenizer(argv: list[str]) -> None:
    parser = _Parser(prog="unmask tokenizer", description="Train a tokenizer on a corpus.")
    parser.add_argument("--data", nargs="+", required=True, help="Corpus, as for `unmask pretrain`.")
    parser.add_argument(
        "--kind",
        default="bpe",
        help="bpe, wordpiece, unigram, char, smiles, residue, 6-mer or 6-mer-overlapping (2 to 8). Default: bpe.",
    )
    parser.add_argument("--vocab_size", type=int, default=8192, help="Tokens, special ones included. Default: 8192.")
    parser.add_argument("--output_dir", type=Path, required=True, help="Where the tokenizer is saved.")
    parser.add_argument("--lowercase", action="store_true", help="Lower-case all text.")
    parser.add_argument("--text_column", help="Column that holds the text.")
    parser.add_argument("--sample_by", default="auto", help="line, paragraph, document or auto.")
    args = parser.parse_args(argv)
    _quiet()
    from unmask.data.corpus import open_corpus
    from unmask.data.tokenizers import train_tokenizer

    _refuse_filled(args.output_dir)
    corpus = open_corpus(args.data, text_column=args.text_column, sample_by=args.sample_by)
    tokenizer = train_tokenizer(corpus, args.kind, args.vocab_size, lowercase=args.lowercase)
    tokenizer.save_pretrained(args.output_dir)
    print(f"{args.kind} tokenizer with {len(tokenizer):,} tokens: {args.output_dir}")


def _objectives(argv: list[str]) -> None:
    parser = _Parser(prog="unmask objectives", description="The named objectives, or what one of them sets.")
    parser.add_argument("name", nargs="?", help="Show every field of this one.")
    args = parser.parse_args(argv)
    from rich.console import Console
    from rich.table import Table

    from unmask.objectives import FIELDS, OBJECTIVES, fields_of, get_objective

    console = Console(width=max(Console().width, 100), highlight=False)
    if args.name is not None:
        given, table = fields_of(args.name), Table("field", "value", "", title=args.name)
        for field, value in get_objective(args.name).to_dict().items():
            table.add_row(field, str(value), "set by it" if field in given else "default")
        console.print(table, OBJECTIVES[args.name].description)
        return
    table = Table("--objective", "what", "differs from", "in")
    for name, (description, parent, fields) in OBJECTIVES.items():
        table.add_row(name, description, parent or "", " ".join(f"{f}={_plain(v)}" for f, v in fields.items()))
    console.print(table)
    console.print(f"--set field=value changes any of: {', '.join(FIELDS)}")


def _plain(value: Any) -> str:
    return ",".join(f"{part:g}" for part in value) if isinstance(value, tuple) else str(value).lower()


def _fill(argv: list[str]) -> None:
    parser = _Parser(prog="unmask fill", description="Predict the [MASK]s of a text.")
    parser.add_argument("run", type=Path, help="Folder of a run, or one of its checkpoints.")
    parser.add_argument("text", help='Text with [MASK], for example "the capital of France is [MASK] ."')
    parser.add_argument("--top_k", type=int, default=5, help="Candidates for each [MASK]. Default: 5.")
    args = parser.parse_args(argv)
    if args.top_k < 1:
        raise UserError(f"top_k is {args.top_k}, but must be at least 1.")
    model, tokenizer = _load_run(args.run)
    from rich.console import Console
    from rich.markup import escape

    from unmask.evaluation.fill import fill, fill_jointly

    console = Console(highlight=False)
    for number, candidates in enumerate(fill(model, tokenizer, args.text, args.top_k), start=1):
        console.print(f"[bold]{escape(tokenizer.mask_token)} {number}[/bold]")
        for token, probability in candidates:
            console.print(f"  {probability:7.2%}  {'█' * round(30 * probability):<1} {escape(token)}")
    if model.objective.states > 1 and args.text.count(tokenizer.mask_token) > 1:
        together = fill_jointly(model, tokenizer, args.text)
        console.print(f"[bold]best together[/bold]  {escape(' · '.join(together))}", soft_wrap=True)


def _export(argv: list[str]) -> None:
    parser = _Parser(prog="unmask export", description="Write a run's encoder as a stock transformers checkpoint.")
    parser.add_argument("run", type=Path, help="Folder of a run, or one of its checkpoints.")
    parser.add_argument("--output_dir", type=Path, required=True, help="Where the encoder is written.")
    args = parser.parse_args(argv)
    _refuse_filled(args.output_dir)
    model, tokenizer = _load_run(args.run)
    from unmask.modeling.export import export
    from unmask.training.pretrain import training_facts

    args.output_dir.parent.mkdir(parents=True, exist_ok=True)
    export(model, tokenizer, args.output_dir, training_facts(args.run))
    print(f"{type(model.encoder).__name__} and its tokenizer: {args.output_dir}")


EVALUATION_EXAMPLES = """
examples:
  unmask evaluate glue runs/mlm runs/mae --tasks cola,rte,sst2 --seeds 5 --data_dir glue
  unmask evaluate probe runs/mlm runs/mae --tasks sst2,stsb --data_dir glue
  unmask evaluate moleculenet runs/smiles --tasks bbbp,bace --seeds 3 --data_dir moleculenet
  unmask evaluate squad runs/mae --data_dir squad
  unmask evaluate table runs/mae --train train.csv --dev dev.csv --text_column text --label_column label
  unmask evaluate probe runs/mlm runs/mae --checkpoints --tasks sst2 --data_dir glue     # score against cost

An encoder is a run's folder, a checkpoint that transformers loads, or a Hub name. What is finished is not run again.
"""


def _evaluate(argv: list[str]) -> None:
    benchmarks = {
        "glue": "fine-tune on GLUE's tasks",
        "squad": "fine-tune on SQuAD 2.0",
        "moleculenet": "fine-tune on MoleculeNet's classification sets, split by scaffold",
        "table": "fine-tune on a table of your own",
        "probe": "frozen features and logistic or ridge regression on any of the tasks: minutes",
    }
    (benchmark, *encoders), flags = _split(argv) if argv and not argv[0].startswith("-") else ([""], argv)
    listing = "\n".join(f"  {name:<12} {what}" for name, what in benchmarks.items())
    if benchmark and benchmark not in benchmarks:
        raise UserError(f"There is no benchmark '{benchmark}': {nearest(benchmark, benchmarks)}")
    try:
        import sklearn  # noqa: F401
    except ImportError:
        raise UserError("Evaluation needs scikit-learn: pip install 'unmask[evaluate]'.") from None
    from transformers import HfArgumentParser

    from unmask.evaluation.benchmark import EvaluationArguments, evaluate

    class Parser(HfArgumentParser):
        error = _Parser.error

    parser = Parser(
        EvaluationArguments,
        prog="unmask evaluate",
        usage="unmask evaluate BENCHMARK ENCODER [ENCODER ...] [--flag value ...]",
        description=f"Score encoders by the published protocols. Benchmarks:\n\n{listing}",
        epilog=EVALUATION_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for action in parser._actions:
        if any(flag.startswith("--no_") for flag in action.option_strings):
            action.help = argparse.SUPPRESS
        elif action.help:
            action.help = action.help.replace("%", "%%")
    (arguments,) = parser.parse_args_into_dataclasses(flags, look_for_args_file=False)
    if not benchmark:
        raise UserError(f"No benchmark is named: choose one of {', '.join(benchmarks)}.")
    _quiet()
    if arguments.checkpoints:
        from unmask.experiments.curve import evaluate_checkpoints

        evaluate_checkpoints(benchmark, encoders, arguments)
    else:
        evaluate(benchmark, encoders, arguments)


ANALYSES = {
    "rank": "effective rank of real tokens and of [MASK], by layer (MAE-LM)",
    "entropy": "how multimodal the predictions at masked positions are (ExLM)",
    "corruption": "trains Repeated MLM over a grid of unreal tokens and corrupted semantics (ExLM)",
    "lattice": "states, transitions and the best path of a text, as a picture (ExLM)",
    "report": "all of it as one HTML file",
}


def _analyze(argv: list[str]) -> None:
    (analysis, *names), flags = _split(argv) if argv and not argv[0].startswith("-") else (["", ""], argv)
    if analysis == "corruption":
        _corruption(flags)
        return
    listing = "\n".join(f"  {name:<11} {what}" for name, what in ANALYSES.items())
    parser = _Parser(
        prog="unmask analyze",
        usage="unmask analyze ANALYSIS MODEL [MODEL ...] --data TEXT [--flag value ...]",
        description=f"What [MASK] does to a model: a run, a checkpoint for transformers, or a Hub name.\n\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--data", nargs="+", help="Text, as for `unmask pretrain`.")
    parser.add_argument("--text_column", help="Column that holds the text.")
    parser.add_argument("--tau", type=float, default=0.9, help="rank: share of the singular values' sum. Default: 0.9.")
    parser.add_argument("--centred", action="store_true", help="rank: about the mean.")
    parser.add_argument("--max_tokens", type=int, default=200_000, help="rank: tokens that are read. Default: 200,000.")
    parser.add_argument("--max_sequences", type=int, default=256, help="entropy: sequences. Default: 256.")
    parser.add_argument("--max_length", type=int, default=128, help="Tokens of a sequence. Default: 128.")
    parser.add_argument("--batch_size", type=int, default=32, help="Sequences at a time. Default: 32.")
    parser.add_argument("--seed", type=int, default=0, help="Of the masks. Default: 0.")
    parser.add_argument("--text", help="report: a text with [MASK]s, for the lattice of each ExLM run.")
    parser.add_argument("--corruption", type=Path, help="report: corruption.json of `unmask analyze corruption`.")
    parser.add_argument("--output_dir", type=Path, default=Path("analysis"), help="Where files go. Default: analysis.")
    parser.add_argument("--output", type=Path, help="lattice: picture (.svg, .png); report: the HTML file.")
    parser.add_argument("--trust_remote_code", action="store_true", help="Run code that a Hub repository brings along.")
    args = parser.parse_args(flags)
    if analysis not in ANALYSES:
        raise UserError(f"There is no analysis '{analysis}': {nearest(analysis, ANALYSES)}")
    if not names:
        raise UserError(
            f"No model is named: give a run, a folder or a Hub name, as in `unmask analyze {analysis} runs/mae`."
        )
    if not 0 < args.tau <= 1:
        raise UserError(f"tau is {args.tau}, but must lie in (0, 1], for example 0.9.")
    _quiet()
    from unmask.experiments import analyses

    getattr(analyses, analysis)(names, args)


def _corruption(flags: list[str]) -> None:
    own = _Parser(add_help=False, allow_abbrev=False)
    own.add_argument("--cells", nargs="+", default=[], help="p,k pairs, as in 0.15,1 0.387,2.")
    own.add_argument("--probe_tasks", help="Tasks that score each encoder, as in sst2,stsb.")
    own.add_argument("--probe_data_dir", help="Folder of those tasks' files.")
    given, rest = own.parse_known_args(flags)
    description = (
        "Repeated MLM: one pretraining for each p,k of --cells (p: share of copies masked, k: copies of each token), "
        "then a probe of each encoder with --probe_tasks and --probe_data_dir. Other flags: `unmask pretrain`'s."
    )
    values = _pretraining_values("unmask analyze corruption --cells P,K ...", rest, description)
    _quiet()
    from unmask.experiments import corruption

    try:
        cells = [(float(p), int(k)) for p, k in (cell.split(",") for cell in given.cells)]
    except ValueError:
        raise UserError(f"--cells {' '.join(given.cells)} cannot be read: write p,k pairs, as in 0.15,1.") from None
    probes = None
    if given.probe_tasks:
        from unmask.evaluation.benchmark import EvaluationArguments

        probes = EvaluationArguments(
            tasks=given.probe_tasks,
            data_dir=given.probe_data_dir,
            seeds=3,
            max_train_samples=5000,
            output_dir=str(Path(values.get("output_dir") or "", "probes")),
        )
    corruption.corruption(cells or corruption.CELLS, probes, **values)


def _load_run(run: Path) -> Any:
    """The model of a run's newest complete checkpoint, and its tokenizer."""
    _quiet()
    if not run.is_dir():
        raise UserError(f"There is no run '{run}': give the output_dir of an `unmask pretrain` run.")
    from unmask.data.tokenizers import load_tokenizer
    from unmask.modeling.pretraining import PretrainingModel
    from unmask.training.trainer import find_checkpoint

    checkpoint = find_checkpoint(run)
    return PretrainingModel.from_pretrained(checkpoint), load_tokenizer(str(checkpoint))


def _refuse_filled(folder: Path) -> None:
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"output_dir '{folder}' is not empty: choose a new folder.")


def _quiet() -> None:
    """Only what the user must know: our own warnings, no library chatter."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    if hasattr(transformers.utils.logging, "disable_progress_bar"):
        transformers.utils.logging.disable_progress_bar()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("unmask: %(message)s"))
    logger = logging.getLogger("unmask")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)


COMMANDS = {
    "tokenizer": (_tokenizer, "train a tokenizer on a corpus: BPE, WordPiece, Unigram, characters, SMILES atoms"),
    "pretrain": (_pretrain, "pretrain an encoder, new or from a checkpoint; a stock encoder comes out"),
    "compare": (_compare, "the same data and steps under several objectives, side by side"),
    "objectives": (_objectives, "list the named objectives, and the fields that make each"),
    "fill": (_fill, "predict the [MASK]s of a text"),
    "evaluate": (_evaluate, "fine-tune and score encoders: GLUE, SQuAD 2.0, MoleculeNet, a table, or by probes"),
    "analyze": (_analyze, "what [MASK] does to a model: rank, entropy, corruption, lattice, a report"),
    "export": (_export, "write a run's encoder as a stock transformers checkpoint"),
}


def keep_memory() -> None:
    """Lets the process keep what it frees, instead of giving it back to the system and fetching it again, zeroed.

    For glibc alone. Measured on 2 CPU cores: steps that hold much take up to 15% less time, peak memory within 4%.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: never trim the heap
        libc.mallopt(-4, 0)  # M_MMAP_MAX: nothing outside of it


def main(argv: list[str] | None = None) -> int:
    """Runs a command; 0 on success, 2 and one sentence on stderr for a user's mistake."""
    argv = sys.argv[1:] if argv is None else argv
    width = max(map(len, COMMANDS))
    usage = "usage: unmask COMMAND ...   (unmask COMMAND --help tells more)\n\n" + "\n".join(
        f"  {name:<{width}}  {help}" for name, (_, help) in COMMANDS.items()
    )
    if not argv or argv[0] in ("-h", "--help"):
        print(usage)
        return 0
    if argv[0] == "--version":
        from unmask import __version__

        print(__version__)
        return 0
    try:
        if argv[0] not in COMMANDS:
            raise UserError(f"There is no command '{argv[0]}': {nearest(argv[0], COMMANDS)}")
        keep_memory()
        COMMANDS[argv[0]][0](argv[1:])
        return 0
    except UserError as error:
        print(f"unmask: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("unmask: stopped; go on with --resume_from_checkpoint latest", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
