"""The `argosy sample` command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from argosy.cli.arguments import MODEL_HELP, Best, alone_or_on_ranks, at_best, layout_keys

if TYPE_CHECKING:
    from argosy.supervise.world import World


def sample(
    run: Annotated[str, typer.Argument(help=MODEL_HELP, metavar="RUN")],
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            help="Text to continue; for BERT with [MASK]s to fill in, for T5 with <extra_id_0> …; several write a batch."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0: greedy decoding.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among this many most likely tokens; 0: among all.")] = 50,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Sample among the likeliest tokens with this probability together.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same text.")] = 0,
    best: Best = False,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1, help="Decoders: share a model too large for one device among this many ranks on this machine."
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            help="With --nproc, how the ranks share the model: keys of `parallel` with commas between, such as tp=2 or pp=2,tp=2; "
            "default: tp, all ranks."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: as the run was trained.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Generate text with a run's newest checkpoint, or another model.

    Several ranks (--nproc) write what one process does, up to the rounding of their sums.
    """
    import json

    def write(world: World | None) -> int:
        from argosy.infer.generate import sample_batch
        from argosy.model.decoding import Sampling

        shared = layout_keys(layout, world)
        options = Sampling(tokens, temperature, top_k, seed, top_p)
        texts = sample_batch(at_best(run, best), prompt or [""], options, device, layout=shared, world=world)
        if world is None or world.rank == 0:
            for text in texts:
                print(json.dumps({"text": text}) if as_json else text)
        return 0

    raise typer.Exit(alone_or_on_ranks(write, nproc))
