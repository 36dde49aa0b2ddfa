"""Train a tokenizer on a corpus, or load one. Trained ones have [PAD] [UNK] [CLS] [SEP] [MASK] as ids 0 to 4."""

import itertools
import logging
import string
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from unmask.errors import UserError, nearest

logger = logging.getLogger("unmask")

# [MASK] takes the space before it with it, as BERT's and RoBERTa's do: "the capital is [MASK] ."
PAD, UNK, CLS, SEP = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
MASK = AddedToken("[MASK]", lstrip=True, special=True)
SPECIAL_TOKENS = [PAD, UNK, CLS, SEP, MASK]

ELEMENTS = """
    H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Y Zr Nb Mo
    Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu Hf Ta W Re Os Ir Pt Au Hg Tl
    Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu Am Cm Bk Cf Es Fm Md No Lr Rf Db Sg Bh Hs Mt Ds Rg Cn Nh Fl Mc Lv Ts Og
    b c n o p s se as te"""
# Every piece of the OpenSMILES grammar, and single letters, so that whatever stands in a bracket can be spelled.
SMILES_ALPHABET = [
    *"()[].-=#$:/\\@+*~>%?" + string.digits + string.ascii_letters,
    "@@",
    *(element for element in ELEMENTS.split() if len(element) > 1),
    *(f"%{ring}" for ring in range(10, 100)),
]
# Whole bracket atoms: isotope, symbol, chirality, hydrogens, charge, class. [MASK] is none, so text cannot forge one.
SMILES_PIECE = (
    r"\[\d*(?:[A-Z][a-z]?|[a-z][a-z]?|\*)(?:@@?|@[A-Z]{2}\d{1,2})?(?:H\d*)?(?:\++|-+|[+-]\d+)?(?::\d+)?\]"
    r"|Br|Cl|%\d\d|[\s\S]"
)
CHARACTER = r"[\s\S]"
# IUPAC: nucleotides and amino acids with their ambiguity codes, and stops; [MASK] is a word of its own.
RESIDUES = [*string.ascii_uppercase, "*"]


def train_tokenizer(
    corpus: Iterable[str], kind: str, vocab_size: int, *, lowercase: bool = False
) -> PreTrainedTokenizerFast:
    """Train a tokenizer of a kind on documents: bpe, wordpiece, unigram, char, smiles, residue, 6-mer, ...

    `bpe` and `unigram` work on bytes, so nothing is unknown to them; `wordpiece` is BERT's, with the 1,000 most
    frequent characters; `smiles` has one token per atom, bond or ring closure and spells bracket atoms that are not in
    its vocabulary; `residue` has one per letter of IUPAC's alphabets, `6-mer` (2 to 8) one per 6 nucleotides in a row,
    `6-mer-overlapping` one per 6 that begin at each letter. `vocab_size` counts the special tokens. `model_max_length`
    is left to the caller. Where counts tie, `wordpiece` and `unigram` may choose other tokens each time.

    Raises `UserError` for an unknown kind, an empty corpus, a vocabulary smaller than the alphabet, lowercase SMILES.
    """
    if kind not in KINDS:
        raise UserError(f"'{kind}' is not a kind of tokenizer: {nearest(kind, KINDS)}")
    tokenizer = KINDS[kind](_not_empty(corpus), vocab_size, lowercase)
    size = tokenizer.get_vocab_size()
    if size > vocab_size:
        _refuse_vocabulary(vocab_size, size)
    if size < vocab_size:
        logger.warning("the corpus gives a %s vocabulary of %d tokens, not %d", kind, size, vocab_size)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLS} $A {SEP}",
        pair=f"{CLS} $A {SEP} $B:1 {SEP}:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (CLS, SEP)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNK,
        cls_token=CLS,
        sep_token=SEP,
        mask_token=MASK,
        clean_up_tokenization_spaces=False,
        **({"overlapping_words": int(kind[0])} if kind.endswith("-overlapping") else {}),
        # Not every encoder takes token types, and pretraining on single segments would leave the second untrained.
        model_input_names=["input_ids", "attention_mask"],
    )


def _bpe(documents: Iterator[str], vocab_size: int, lowercase: bool) -> Tokenizer:
    tokenizer = _on_bytes(models.BPE(), lowercase)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def _unigram(documents: Iterator[str], vocab_size: int, lowercase: bool) -> Tokenizer:
    tokenizer = _on_bytes(models.Unigram(), lowercase)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(SPECIAL_TOKENS) + len(alphabet):  # its trainer would fail without saying by how much
        _refuse_vocabulary(vocab_size, len(SPECIAL_TOKENS) + len(alphabet))
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, unk_token=UNK
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def _on_bytes(model: models.Model, lowercase: bool) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


def _wordpiece(documents: Iterator[str], vocab_size: int, lowercase: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNK))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, limit_alphabet=1000)
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def _char(documents: Iterator[str], vocab_size: int, lowercase: bool) -> Tokenizer:
    return _pieces(CHARACTER, [], documents, vocab_size, lowercase)


def _smiles(documents: Iterator[str], vocab_size: int, lowercase: bool) -> Tokenizer:
    if lowercase:
        raise UserError("SMILES cannot be lowercased, as C and c are different atoms: leave lowercase off")
    return _pieces(SMILES_PIECE, SMILES_ALPHABET, documents, vocab_size, lowercase)


def _pieces(pattern: str, alphabet: list[str], documents: Iterator[str], vocab_size: int, lowercase: bool) -> Tokenizer:
    """The matches of a pattern as tokens: the alphabet, then the corpus's most frequent ones."""
    tokenizer = Tokenizer(models.WordLevel(unk_token=UNK))
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.train_from_iterator(documents, trainers.WordLevelTrainer(vocab_size=1 << 31))
    counted = tokenizer.get_vocab()
    required = [PAD, UNK, CLS, SEP, MASK.content, *alphabet]
    vocabulary = list(dict.fromkeys([*required, *sorted(counted, key=counted.__getitem__)]))
    kept = vocabulary[: max(vocab_size, len(required))]
    if len(kept) < len(vocabulary):
        logger.warning("the vocabulary leaves out the %d rarest tokens", len(vocabulary) - len(kept))
    # WordPiece without a prefix takes the longest known piece again and again: it spells a match that it does not know.
    ids = {token: index for index, token in enumerate(kept)}
    tokenizer.model = models.WordPiece(ids, unk_token=UNK, continuing_subword_prefix="")
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return tokenizer


def _residue(documents: Iterator[str], vocab_size: int, lowercase: bool) -> Tokenizer:
    return _pieces(CHARACTER, RESIDUES, _sequences(documents, lowercase), vocab_size, lowercase)


def _kmer(k: int, documents: Iterator[str], vocab_size: int, lowercase: bool) -> Tokenizer:
    """k nucleotides in a row, without overlap; what is left over or ambiguous is spelled letter by letter."""
    words = ["".join(letters) for letters in itertools.product("ACGT", repeat=k)]
    return _pieces(
        rf"[ACGT]{{{k}}}|{CHARACTER}", [*RESIDUES, *words], _sequences(documents, lowercase), vocab_size, False
    )


def _overlapping(k: int, documents: Iterator[str], vocab_size: int, lowercase: bool) -> Tokenizer:
    """Every k letters in a row, one letter apart (DNABERT's); the text is spaced out first (`prepared`)."""
    spaced = (overlapping(document, k) for document in _sequences(documents, lowercase))
    words = ["".join(letters) for letters in itertools.product("ACGT", repeat=k)]
    tokenizer = _pieces(r"\s+", [*RESIDUES, *words], spaced, vocab_size, False)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def _sequences(documents: Iterator[str], lowercase: bool) -> Iterator[str]:
    if lowercase:
        raise UserError("residues are written in capitals: leave lowercase off")
    return documents


def overlapping(sequence: str, k: int) -> str:
    """A sequence as its words of k letters, each a letter on from the last, spaces between; [MASK] stands alone."""
    parts = sequence.split(MASK.content)
    words = [[part[i : i + k] for i in range(max(len(part) - k + 1, bool(part)))] for part in map(str.strip, parts)]
    return f" {MASK.content} ".join(" ".join(run) for run in words).strip()


def prepared(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """What a tokenizer is given for a text: the text itself, or its overlapping words."""
    k = tokenizer.init_kwargs.get("overlapping_words")
    return overlapping(text, k) if k else text


def shown(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """A token as text; white space, which would not be seen, as it is written in code."""
    text = tokenizer.decode([token])
    return text.strip() or repr(text)


KINDS: dict[str, Callable[[Iterator[str], int, bool], Tokenizer]] = {
    "bpe": _bpe,
    "wordpiece": _wordpiece,
    "unigram": _unigram,
    "char": _char,
    "smiles": _smiles,
    "residue": _residue,
    **{f"{k}-mer": partial(_kmer, k) for k in range(2, 9)},
    **{f"{k}-mer-overlapping": partial(_overlapping, k) for k in range(2, 9)},
}


def _not_empty(corpus: Iterable[str]) -> Iterator[str]:
    document = None
    for document in corpus:
        yield document
    if document is None:
        raise UserError("the corpus has no documents to train a tokenizer on: check the files and their text column")


def _refuse_vocabulary(vocab_size: int, needed: int) -> NoReturn:
    raise UserError(
        f"a vocabulary of {vocab_size} is too small: special tokens and alphabet take {needed}; ask for more than that"
    )


def load_tokenizer(
    name_or_path: str | Path, trust_remote_code: bool = False, needs: tuple[str, ...] = ("mask", "pad")
) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or the Hub.

    needs: `mask`, to predict at, and `pad`, to fill batches with. Raises `UserError` if it cannot be loaded, or lacks
    one of them.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises anything: no such name, no network, a broken file, remote code
        reason = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
        raise UserError(
            f"no tokenizer can be loaded from '{name_or_path}' ({reason}): check the folder or the name"
        ) from error
    for role in needs:
        if getattr(tokenizer, f"{role}_token_id") is None:
            raise UserError(
                f"'{name_or_path}' is a tokenizer without [{role.upper()}]: an encoder needs its {role}_token; choose "
                "an encoder's tokenizer or train one"
            )
    return tokenizer


def boundaries(tokenizer: PreTrainedTokenizerBase) -> tuple[int | None, int | None]:
    """The ids that begin and end a sequence: [CLS] or else BOS, [SEP] or else EOS; None where there is neither."""
    start, end = tokenizer.cls_token_id, tokenizer.sep_token_id
    return (
        tokenizer.bos_token_id if start is None else start,
        tokenizer.eos_token_id if end is None else end,
    )
