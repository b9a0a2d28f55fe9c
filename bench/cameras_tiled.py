"""Compare one pass for the images of all envs with one render call per env, from 16 to 4096 envs, in one run.

    python bench/cameras_tiled.py                                   on a GPU; writes bench/results/cameras_tiled.json
    python bench/cameras_tiled.py --plot                            draw bench/results/cameras_tiled.png from that file
    python bench/cameras_tiled.py --device cpu --num-envs 2 4 --repeats 1 --name dry_run

Both render rgb, depth and segmentation of the scene of go1-velocity into the same tensors, with the same kernel:

- pass: one call for all envs, captured as a CUDA graph, as in training;
- calls: one call per env, of a renderer for one env that writes into the env's part of the tensors;
- graph: the same calls, captured as one CUDA graph, which removes the cost of the calls on the host.
"""

import argparse
import json

import rates
import torch
from rich.console import Console
from rich.table import Table

from cameras import STREAMS, make_images, task_model
from paceline.cameras.camera import Camera
from paceline.cameras.gpu_renderer import GpuRenderer
from paceline.sim.warp_sim import WarpSim
from paceline.tensors.graph import capture

# Label and color, from the palette of Okabe and Ito, which color-blind readers can distinguish.
LINES = {
    "pass": ("one pass for all envs", "#0072B2"),
    "graph": ("one call per env, as one CUDA graph", "#009E73"),
    "calls": ("one call per env", "#D55E00"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, nargs="+", default=[2**exponent for exponent in range(4, 13)])
    parser.add_argument("--size", type=int, default=64, help="width and height of an image in pixels")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--repeats", type=int, default=20, help="measured passes over all envs")
    parser.add_argument("--name", default="cameras_tiled", help="name of the files in bench/results")
    parser.add_argument("--plot", action="store_true", help="Draw the plot of the stored results; measure nothing.")
    args = parser.parse_args()
    if args.plot:
        plot(args.name)
        return
    device, rows = torch.device(args.device), []
    for num_envs in args.num_envs:
        rows.append(measure(num_envs, args.size, device, args.repeats))
        rates.write(args.name, unit="images per second", device=args.device, size=args.size, rows=rows)
        print(" ".join(f"{name} {rates.show(value)}" for name, value in rows[-1].items()), flush=True)
    table = Table(*rows[0], title=f"{args.size}x{args.size} images on {args.device}, images/s")
    for row in rows:
        table.add_row(*map(rates.show, row.values()))
    Console(width=120).print(table)


def measure(num_envs: int, size: int, device: torch.device, repeats: int) -> dict[str, int | float]:
    """Return images per second for one number of envs."""
    camera = Camera(width=size, height=size, streams=STREAMS, far=100.0, depth_dtype="float32")
    images = make_images(camera, num_envs, device)
    parts = [{stream: image[env : env + 1] for stream, image in images.items()} for env in range(num_envs)]
    model = task_model("go1-velocity")
    name, due = model.camera(0).name, torch.ones(num_envs, dtype=torch.bool, device=device)
    together = GpuRenderer(name, camera, WarpSim(model, num_envs, device), {})
    single = GpuRenderer(name, camera, WarpSim(model, 1, device), {})

    def calls() -> None:
        for part in parts:
            single.render(part, due[:1])

    works = {
        "pass": capture(lambda: together.render(images, due), device, warp=True),
        "calls": calls,
        "graph": capture(calls, device, warp=True),
    }
    found = {name: num_envs / rates.seconds_per_call(work, device, repeats) for name, work in works.items()}
    ratios = {f"pass/{name}": found["pass"] / found[name] for name in ("calls", "graph")}
    return {"envs": num_envs, **found, **ratios}


def plot(name: str) -> None:
    """Draw images per second over the number of envs."""
    from matplotlib.figure import Figure

    results = json.loads((rates.RESULTS / f"{name}.json").read_text())
    rows, size = results["rows"], results["size"]
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    envs = [row["envs"] for row in rows]
    for kind, (label, color) in LINES.items():
        axes.plot(envs, [row[kind] for row in rows], "o-", color=color, label=label)
    axes.set(xscale="log", yscale="log", xlabel="number of envs", ylabel="images/s")
    axes.set_xticks(envs, [f"{number:,}" for number in envs])
    axes.minorticks_off()
    machine = results["machine"].get("gpu", results["machine"]["cpu"])
    axes.set_title(f"{size}x{size} rgb, depth and segmentation, {machine}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(rates.RESULTS / f"{name}.png", dpi=120)


if __name__ == "__main__":
    main()
