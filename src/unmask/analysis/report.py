"""One HTML file of all analyses: opens from disk, asks for nothing from a network, light and dark, on a phone too.

Everything that comes from a corpus or a tokenizer is escaped where it enters the page.
"""

import base64
import csv
import html
import io
import json
from collections.abc import Sequence
from typing import Any

from unmask.analysis.lattice import Lattice
from unmask.analysis.lattice import draw as draw_lattice
from unmask.analysis.rank import RankAnalysis, verdict

INK = "#777777"  # of axes and text in figures: read on white and on black

STYLE = """
:root{color-scheme:light dark;--line:#8884;--soft:#8881}
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:auto;padding:1rem;overflow-wrap:anywhere}
figure{margin:1rem 0;overflow-x:auto}figure svg{max-width:100%;height:auto}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.9rem}
th,td{padding:.25rem .6rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}th{cursor:pointer;background:var(--soft)}
a.data{font-size:.85rem;margin-right:1rem}code{background:var(--soft);padding:.1em .3em}
@media(max-width:40rem){body{font-size:15px;padding:.6rem}}
"""

SORT = """
for(const th of document.querySelectorAll("th"))th.addEventListener("click",()=>{
 const table=th.closest("table"),i=[...th.parentNode.children].indexOf(th),body=table.tBodies[0];
 const up=th.dataset.up!=="1";th.dataset.up=up?"1":"0";
 const key=row=>{const t=row.children[i].textContent,n=parseFloat(t);return isNaN(n)?t:n};
 const rows=[...body.rows].sort((a,b)=>{const x=key(a),y=key(b);return (x<y?-1:x>y?1:0)*(up?1:-1)});
 body.append(...rows);
});
"""


def build(
    ranks: Sequence[RankAnalysis] = (),
    entropies: dict[str, dict[str, Any]] | None = None,
    lattices: dict[str, Lattice] | None = None,
    corruption: dict[str, Any] | None = None,
) -> str:
    """The page, from what the analyses return; each part is left out where there is nothing to show."""
    parts = []
    if ranks:
        parts.append(_rank(ranks))
    if entropies:
        parts.append(_entropy(entropies))
    for name, lattice in (lattices or {}).items():
        parts.append(_lattice(name, lattice))
    if corruption:
        parts.append(_corruption(corruption))
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>What [MASK] does to a model</title><style>{STYLE}</style></head><body>"
        f"<h1>What [MASK] does to a model</h1>{''.join(parts)}<script>{SORT}</script></body></html>"
    )


def _rank(ranks: Sequence[RankAnalysis]) -> str:
    rows = [
        {
            "model": found.model,
            "layer": layer,
            "size": row["size"],
            **{f"{kind}": round(row[kind]["effective_rank"]) for kind in ("plain", "real", "mask", "all")},
            "plain, standard error": _round(row["plain"]["standard_error"]),
            "entropy rank": _round(row["plain"]["entropy_rank"]),
            "participation ratio": _round(row["plain"]["participation_ratio"]),
            "stable rank": _round(row["plain"]["stable_rank"]),
            "[MASK] variance unused": _round(row["overlap"]["unused_variance"], 3),
        }
        for found in ranks
        for layer, row in enumerate(found.layers)
    ]
    text = (
        f"The fewest singular values that hold {ranks[0].tau:.0%} of their sum, by layer (0 is the embeddings), for "
        f"{ranks[0].tokens:,} tokens. Read two things: whether [MASK] begins near 1 and takes more dimensions with "
        "depth, and whether real tokens of the text without [MASK] (plain) fill fewer dimensions than the layer has. "
        "Bars are 1.96 standard errors over groups of sequences."
    )
    text += "".join(f" {verdict(found)}" for found in ranks)
    return _section("Rank", text, rank_figure(ranks), rows, "rank")


def rank_figure(ranks: Sequence[RankAnalysis]) -> Any:
    """Effective rank by layer: real tokens without [MASK], and [MASK]s; one colour a model."""
    figure, axes = _axes()
    for number, found in enumerate(ranks):
        for kind, line in (("plain", "-"), ("mask", ":")):
            values = [row[kind]["effective_rank"] for row in found.layers]
            errors = [1.96 * row[kind]["standard_error"] for row in found.layers]
            errors = [0.0 if error != error else error for error in errors]
            label = f"{_plain(found.model)}, {'real tokens' if kind == 'plain' else '[MASK]'}"
            axes.errorbar(range(len(values)), values, errors, ls=line, color=f"C{number}", marker="o", label=label)
    axes.set_xlabel("layer")
    axes.set_xticks(range(max(len(found.layers) for found in ranks)))
    axes.set_ylabel("effective rank")
    axes.legend(frameon=False, labelcolor=INK)
    return figure


def _entropy(entropies: dict[str, dict[str, Any]]) -> str:
    rows = [
        {"model": model, "cut": cut.removeprefix("by_"), "bin": name, **{k: _round(v, 3) for k, v in row.items()}}
        for model, found in entropies.items()
        for cut in ("by_ratio", "by_frequency", "by_part")
        for name, row in found[cut].items()
    ]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    rows = [{name: row.get(name, "") for name in columns} for row in rows]
    text = (
        "Entropy in nats of the marginal prediction at a masked position: high where many tokens would fit. It should "
        "rise with the share that is masked; a model whose entropy stays below its loss is surer than it should be."
    )
    figure, axes = _axes()
    for number, (model, found) in enumerate(entropies.items()):
        ratios = [float(ratio) for ratio in found["by_ratio"]]
        for name, line in (("entropy", "-"), ("loss", ":")):
            values = [row[name] for row in found["by_ratio"].values()]
            axes.plot(ratios, values, line, color=f"C{number}", marker="o", label=f"{_plain(model)}, {name}")
    axes.set_xlabel("share of tokens masked")
    axes.set_ylabel("nats")
    axes.legend(frameon=False, labelcolor=INK)
    return _section("Entropy", text, figure, rows, "entropy")


def _lattice(name: str, found: Lattice) -> str:
    rows = [
        {
            "vertex": number,
            "position": vertex.position,
            "state": vertex.state,
            "tokens": "  ".join(f"{token} {p:.1%}" for token, p in vertex.tokens),
            "on the best path": "yes" if number in found.best_path else "",
        }
        for number, vertex in enumerate(found.vertices)
        if vertex.state
    ]
    text = (
        f"{name}, on: {' '.join(found.text)}. Each box is a state with its likeliest tokens, each arrow a transition; "
        "the likeliest path is orange. Where it takes one state of each position in turn, states and positions agree."
    )
    return _section("Lattice", text, draw_lattice(found), rows, "lattice")


def _corruption(found: dict[str, Any]) -> str:
    rows = [
        {
            "unreal tokens p": _round(cell["p"], 3),
            "copies k": cell["k"],
            "corrupted semantics p^k": _round(cell["p"] ** cell["k"], 3),
            **{task: _round(100 * value, 1) for task, value in cell["scores"].items()},
            "token loss": _round(cell["eval_token_loss"], 3),
        }
        for cell in found["cells"]
    ]
    text = (
        "Repeated MLM: k copies of each token, each masked with probability p. Along one curve the other quantity is "
        "fixed: if the score falls with p at fixed p^k, [MASK]s themselves harm; if it falls with p^k at fixed p, lost "
        "meaning does."
    )
    return _section("Corruption", text, corruption_figure(found), rows, "corruption")


def corruption_figure(found: dict[str, Any]) -> Any:
    """Both cuts: score against p at fixed p^k, and against p^k at fixed p."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    cells = [{**cell, "pk": round(cell["p"] ** cell["k"], 2)} for cell in found["cells"]]
    for panel, along, fixed, label in (
        (panels[0], "p", "pk", "unreal tokens p"),
        (panels[1], "pk", "p", "corrupted semantics p^k"),
    ):
        _paint(panel)
        for value in sorted({round(cell[fixed], 2) for cell in cells}):
            own = sorted((c for c in cells if round(c[fixed], 2) == value), key=lambda c: c[along])
            if len(own) > 1:
                mean = [100 * sum(c["scores"].values()) / len(c["scores"]) for c in own]
                panel.plot(
                    [c[along] for c in own], mean, marker="o", label=f"{'p^k' if fixed == 'pk' else 'p'} = {value}"
                )
        panel.set_xlabel(label)
        panel.legend(frameon=False, labelcolor=INK)
    panels[0].set_ylabel("probe score, in percent")
    return figure


def _section(title: str, text: str, figure: Any, rows: list[dict[str, Any]], name: str) -> str:
    return (
        f'<section id="{name}"><h2>{html.escape(title)}</h2><p>{html.escape(text)}</p><figure>{as_svg(figure)}</figure>'
        f"<p>{_download(json.dumps(rows, indent=1), f'{name}.json', 'application/json')}"
        f'{_download(_csv(rows), f"{name}.csv", "text/csv")}</p><div class="wide">{_table(rows)}</div></section>'
    )


def as_svg(figure: Any) -> str:
    """A figure as an SVG element, without a background, and closed."""
    from matplotlib import pyplot

    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    pyplot.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _axes() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.8), layout="constrained")
    _paint(axes)
    return figure, axes


def _paint(axes: Any) -> None:
    axes.grid(alpha=0.25)
    axes.tick_params(colors=INK)
    for side in axes.spines.values():
        side.set_color(INK)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)


def _plain(text: str) -> str:
    """Text that matplotlib does not take for mathematics, the end of a path."""
    return "/".join(text.split("/")[-2:]).replace("$", r"\$")


def _round(value: float, digits: int = 1) -> float | str:
    return "" if value != value else round(float(value), digits)


def _table(rows: list[dict[str, Any]]) -> str:
    head = "".join(f"<th>{html.escape(str(name))}</th>" for name in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(value))}</td>" for value in row.values()) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _csv(rows: list[dict[str, Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def _download(content: str, name: str, kind: str) -> str:
    data = base64.b64encode(content.encode()).decode()
    return f'<a class="data" download="{name}" href="data:{kind};base64,{data}">{name}</a>'
