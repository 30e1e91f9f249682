"""The pictures of docs/explanation/parallelism-in-pictures.md: `python benchmarks/parallelism_pictures.py` writes them as SVG.

Each shows four ranks in a row, as boxes, and what each of them has. Colours and text adapt to a dark page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

IMAGES = Path(__file__).parents[1] / "docs" / "images"
RANKS = 4
_STYLE = """<style>
text { font: 13px system-ui, sans-serif; fill: #333 } .small { font-size: 11px } .head { font-weight: 600 }
.rank { fill: none; stroke: #999 } .weight { fill: #4c6ef5 } .state { fill: #9775fa } .token { fill: #12b886 } .gone { fill: #8884 }
.back { fill: #fd7e14 } .line { stroke: #e8590c; stroke-width: 1.5; fill: none; marker-end: url(#tip); marker-start: url(#tip) }
@media (prefers-color-scheme: dark) { text { fill: #ddd } }
</style>
<defs><marker id="tip" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" orient="auto-start-reverse">
<path d="M0 0 6 3 0 6z" fill="#e8590c"/></marker></defs>"""


def svg(width: int, height: int, title: str, parts: Iterator[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">\n'
        f"<title>{title}</title>\n{_STYLE}\n" + "\n".join(parts) + "\n</svg>\n"
    )


def box(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2"/>'


def words(text: str, x: float, y: float, kind: str = "", anchor: str = "middle") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{text}</text>'


def ranks(below: str, content: list[list[str]]) -> Iterator[str]:
    """Draw the ranks with their contents, arrows between neighbours, and a line of text below."""
    for rank in range(RANKS):
        x = 10 + rank * 170
        yield box("rank", x, 30, 150, 130)
        yield words(f"rank {rank}", x + 75, 22, "head")
        yield from content[rank]
        if rank + 1 < RANKS:
            yield f'<path class="line" d="M{x + 150} 95h20"/>'
    yield words(below, 10, 182, "small", "start")


def matrix(rank: int, part: tuple[float, float, float, float], kind: str = "weight", y: float = 40) -> Iterator[str]:
    """Draw a matrix of 60 x 60 in grey, and in colour the part (left, top, width, height as shares) that a rank has."""
    x = 10 + rank * 170 + 15
    left, top, width, height = part
    yield box("gone", x, y, 60, 60)
    yield box(kind, x + 60 * left, y + 60 * top, 60 * width, 60 * height)


def tokens(rank: int, first: float, count: float, rows: int = 4) -> Iterator[str]:
    """Draw a batch of `rows` sequences in grey, and in colour the share of the tokens (rows if count > 1) that a rank has."""
    x = 10 + rank * 170 + 85
    for row in range(rows):
        yield box("gone", x, 40 + row * 16, 54, 12)
        if count >= 1 and first <= row < first + count:
            yield box("token", x, 40 + row * 16, 54, 12)
        elif count < 1:
            yield box("token", x + 54 * first, 40 + row * 16, 54 * count, 12)


def note(rank: int, *lines: str) -> Iterator[str]:
    for number, line in enumerate(lines):
        yield words(line, 10 + rank * 170 + 75, 122 + 16 * number, "small")


def row_of_ranks(below: str, draw: Callable[[int], Iterator[str]]) -> str:
    content = [list(draw(rank)) for rank in range(RANKS)]
    return svg(690, 195, below, ranks(below, content))


def replicas(rank: int) -> Iterator[str]:
    yield from matrix(rank, (0, 0, 1, 1))
    yield from tokens(rank, rank, 1)
    yield from note(rank, "all weights", "1/4 of the samples")


def sharded(rank: int) -> Iterator[str]:
    yield from matrix(rank, (0, rank / RANKS, 1, 1 / RANKS), "state")
    yield from tokens(rank, rank, 1)
    yield from note(rank, "1/4 of weights and state", "1/4 of the samples")


def tensor(rank: int) -> Iterator[str]:
    yield from matrix(rank, (rank / RANKS, 0, 1 / RANKS, 1))
    yield from tokens(rank, 0, RANKS)
    yield from note(rank, "1/4 of every matrix", "all samples")


def context(rank: int) -> Iterator[str]:
    yield from matrix(rank, (0, 0, 1, 1))
    x = 10 + rank * 170 + 85
    yield from tokens(rank, 0, 0)
    for row in range(4):
        for piece in (rank, 2 * RANKS - 1 - rank):
            yield box("token", x + 54 * piece / 8, 40 + row * 16, 54 / 8, 12)
    yield from note(rank, "all weights", "1/4 of every sequence")


def experts(rank: int) -> Iterator[str]:
    x = 10 + rank * 170 + 15
    for expert in range(8):
        kind = "weight" if expert // 2 == rank else "gone"
        yield box(kind, x + 31 * (expert % 2), 40 + 15 * (expert // 2), 29, 13)
    yield from tokens(rank, rank, 1)
    yield from note(rank, "2 of 8 experts", "1/4 of the samples")


def stages(rank: int) -> Iterator[str]:
    x = 10 + rank * 170 + 15
    for layer in range(8):
        yield box("weight" if layer // 2 == rank else "gone", x, 40 + 8 * layer, 60, 6)
    yield from tokens(rank, 0, RANKS)
    yield from note(rank, "2 of 8 layers", "all samples")


def one_f_one_b(stages_: int, micros: int) -> list[list[tuple[str, int, int, int]]]:
    """Return for each stage (kind, micro-batch, start, length) of 1F1B, with backward passes of two units."""
    orders = []
    for stage in range(stages_):
        warm = min(stages_ - stage, micros)
        order = [("token", m) for m in range(warm)]
        for m in range(micros):
            order.append(("back", m))
            if warm + m < micros:
                order.append(("token", warm + m))
        orders.append(order)
    ends: dict[tuple[str, int, int], int] = {}
    done: list[list[tuple[str, int, int, int]]] = [[] for _ in range(stages_)]
    while any(len(done[s]) < len(orders[s]) for s in range(stages_)):
        for stage in range(stages_):
            if len(done[stage]) == len(orders[stage]):
                continue
            kind, micro = orders[stage][len(done[stage])]
            source = stage - 1 if kind == "token" else stage + 1
            outside = source in (-1, stages_)
            needs = ("token", stage, micro) if outside and kind == "back" else (kind, source, micro)
            if needs in ends or (outside and kind == "token"):
                free = done[stage][-1][2] + done[stage][-1][3] if done[stage] else 0
                start, length = max(free, ends.get(needs, 0)), 1 if kind == "token" else 2
                done[stage].append((kind, micro, start, length))
                ends[kind, stage, micro] = start + length
    return done


def timeline() -> Iterator[str]:
    done, unit = one_f_one_b(RANKS, 8), 18.0
    for rank, work in enumerate(done):
        yield words(f"rank {rank}", 10, 36 + rank * 26, "head", "start")
        yield box("gone", 70, 22 + rank * 26, 33 * unit, 20)
        for kind, micro, start, length in work:
            yield box(kind, 70 + start * unit, 22 + rank * 26, length * unit - 1, 20)
            yield words(str(micro), 70 + (start + length / 2) * unit, 36 + rank * 26, "small")
    yield words(
        "time, for one step of 8 micro-batches; green: forward, orange: backward, grey: idle", 70, 146, "small", "start"
    )


def pictures() -> dict[str, str]:
    """Return the text of each picture by its file's name."""
    return {
        "parallel-replicas.svg": row_of_ranks("gradients are summed over all ranks, once a step", replicas),
        "parallel-sharded.svg": row_of_ranks("each layer is all-gathered before it is used; its gradient is reduce-scattered", sharded),
        "parallel-tensor.svg": row_of_ranks("activations are gathered and summed around each pair of matrices", tensor),
        "parallel-context.svg": row_of_ranks("keys and values are exchanged in every attention", context),
        "parallel-experts.svg": row_of_ranks("each token is sent to the ranks of its experts, and back", experts),
        "parallel-stages.svg": row_of_ranks("activations go to the next rank, gradients come back", stages),
        "parallel-pipeline.svg": svg(690, 156, "A step of 1F1B with 4 ranks and 8 micro-batches", timeline()),
    }  # fmt: skip


def main() -> None:
    for name, text in pictures().items():
        (IMAGES / name).write_text(text)


if __name__ == "__main__":
    main()
