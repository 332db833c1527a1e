"""``gockpt plan``: over how many windows a checkpoint would be taken, and what it would cost."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from gockpt.cli import options, output
from gockpt.errors import ConfigError

if TYPE_CHECKING:
    from gockpt.cli.task import Task
    from gockpt.plan import Plan, Situation

SLOTS = 2


def plan(
    model: options.Model = "gpt-1.3b",
    device: Annotated[
        str, typer.Option(help="emulated:PROFILE, whose figures are used.")
    ] = "emulated:a100-pcie4",
    interval: Annotated[
        int | None, typer.Option(help="Steps between checkpoints.", show_default="no limit")
    ] = None,
    tokens: options.Tokens = None,
    windows: options.Windows = None,
    precision: options.Precision = None,
    window_s: Annotated[
        float | None, typer.Option(help="Your own seconds of forward and backward.")
    ] = None,
    update_s: Annotated[float | None, typer.Option(help="Your own seconds of an update.")] = None,
    link_gb_s: Annotated[
        float | None, typer.Option(help="Your own link while computing, in GB/s.")
    ] = None,
    json: options.Json = None,
    profile_file: options.ProfileFile = None,
) -> None:
    """Predict windows, stall, traffic and memory of a checkpoint, in the model's true size."""
    from gockpt import hostmemory
    from gockpt.cli.task import resolve
    from gockpt.plan import one_window_stall
    from gockpt.plan import plan as make_plan

    output.check_target(json)
    for name, value in (("--interval", interval), ("--windows", windows), ("--window-s", window_s),
                        ("--update-s", update_s), ("--link-gb-s", link_gb_s)):  # fmt: skip
        if value is not None and value <= 0:
            raise ConfigError(f"{name} must be above 0, not {value}")
    task, _ = resolve(
        model=model,
        device="auto" if profile_file is not None else device,
        tokens=tokens,
        precision=precision,
        profile_file=profile_file,
    )
    situation = situation_of(
        task, every=interval, window_s=window_s, update_s=update_s, link_gb_s=link_gb_s
    )
    made = make_plan(situation, windows=windows)
    document = _document(task, situation, made, one_window_stall(situation), hostmemory.available())
    if json is not None:
        output.write_document(document, json)
    output.people(stderr=json == output.STDOUT).print(_table(document))


def situation_of(
    task: Task,
    *,
    every: int | None,
    window_s: float | None = None,
    update_s: float | None = None,
    link_gb_s: float | None = None,
) -> Situation:
    """What the plan of a task depends on, by its profile and whatever the user knows better.

    Raises:
        ConfigError: the device has no profile, so nothing is known before it is measured.
    """
    from gockpt.cli.task import modelled_work
    from gockpt.plan import Situation
    from gockpt.workloads import param_count

    profile, work = task.profile, modelled_work(task)
    if profile is None or work is None:
        raise ConfigError(
            f"--device {task.device}: a plan needs a profile's figures; name emulated:PROFILE, and "
            "give what you have measured with --window-s, --update-s and --link-gb-s"
        )
    number, params = task.number_format, param_count(task.preset)
    # Weights that are the cast of their master are not sent.
    sent = number.state_bytes - (number.weights.itemsize if number.master else 0)
    link = profile.link_alone * profile.link_computing_factor
    window = work.forward_s + work.backward_s
    return Situation(
        params=params,
        state_bytes=sent,
        grad_bytes=number.grad_bytes,
        window_s=window if window_s is None else window_s,
        update_s=work.update_s if update_s is None else update_s,
        forward_s=(window if window_s is None else window_s) * work.forward_s / window,
        link_rate=link if link_gb_s is None else link_gb_s * 1e9,
        link_rate_alone=max(profile.link_alone, (link_gb_s or 0.0) * 1e9),
        replay_rate=profile.host_replay,
        write_rate=profile.ssd_write,
        every=every,
        image_bytes=params * number.state_bytes,
        slots=SLOTS,
        ring=2 * params * number.grad_bytes,
        headroom=max(0, int(profile.device_memory_bytes - work.resident_bytes)),
    )


def _document(
    task: Task, situation: Situation, made: Plan, alone_s: float, available: int
) -> dict[str, Any]:
    return {
        "schema": 1,
        "kind": "plan",
        "workload": {
            "model": task.model,
            "precision": task.precision,
            "params": situation.params,
            "tokens_per_step": task.tokens,
            "interval": situation.every,
        },
        "device": task.device,
        "emulated": True,
        "situation": {
            "window_s": situation.window_s,
            "update_s": situation.update_s,
            "link_bytes_per_s": situation.link_rate,
            "replay_params_per_s": situation.replay_rate,
            "write_bytes_per_s": situation.write_rate,
        },
        "plan": asdict(made),
        "one_window_stall_s": alone_s,
        "memory_available_bytes": available,
    }


def _table(document: dict[str, Any]) -> Table:
    job, made, given = document["workload"], document["plan"], document["situation"]
    table = Table(
        box=box.SIMPLE_HEAD,
        show_header=False,
        title=f"{job['model']}, {job['precision']}, {job['tokens_per_step']:,} tokens a step – "
        f"{document['device']} (predicted)",
        title_justify="left",
        caption=made["note"],
        caption_justify="left",
    )
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    every = f"every {job['interval']} steps" if job["interval"] else ""
    for name, value, remark in (
        ("windows (K)", str(made["windows"]), every),
        ("stall of a checkpoint", output.seconds(made["stall_s"]),
         f"in one window: {output.seconds(document['one_window_stall_s'])}"),
        ("state sent", output.size(made["state_bytes"]), ""),
        ("gradients sent", output.size(made["gradient_bytes"]),
         f"{made['traffic_factor']:.2f} × the state in all"),
        ("host memory", output.size(made["memory_bytes"]),
         f"{SLOTS} slots and a ring of {output.size(made['ring_bytes'])}; here are "
         f"{output.size(document['memory_available_bytes'])}"),
        ("device memory for held gradients", output.size(made["held_bytes"]), ""),
        ("replay after the last window", output.seconds(made["replay_s"]), ""),
        ("window, update", f"{output.seconds(given['window_s'])}, "
         f"{output.seconds(given['update_s'])}", ""),
        ("link while computing", f"{output.size(given['link_bytes_per_s'])}/s", ""),
    ):  # fmt: skip
        table.add_row(name, value, remark)
    return table
