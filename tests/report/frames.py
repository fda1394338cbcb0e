"""How fast the report moves in headless Chromium, as a table.

    python -m tests.report.frames PLAN.json... > benchmarks/results/report_frames.md

One row for each plan, and one for a step of 65,536 events. A frame of zooming at 60 Hz is 16.7 ms.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.report.data import report_data
from megatron_autorecompute.report.html import html
from testing.browser import chromium, opened
from tests.report.plans import long_step

EVENTS = "stages.reduce((sum, stage) => sum + stage.count, 0)"
FRAME_MS = """() => new Promise(done => {
  const canvas = document.getElementById("pipeline"), times = [];
  const box = canvas.getBoundingClientRect();
  let last = performance.now();
  const frame = now => {
    times.push(now - last);
    last = now;
    if (times.length > 40) { done(times.slice(3).sort((a, b) => a - b)[18]); return; }
    canvas.dispatchEvent(new WheelEvent("wheel", {deltaY: times.length < 20 ? -60 : 60,
      ctrlKey: true, clientX: box.left + box.width / 2, clientY: box.top + 40, bubbles: true,
      cancelable: true}));
    requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
})"""


def main(paths: list[str]) -> None:
    """Print the table."""
    shown = {Path(path).name.partition(".")[0]: report_data(Plan.load(path)) for path in paths}
    shown["126 layers, 16 stages x 8 chunks, 256 microbatches"] = long_step()
    print("| step | events | page MB | frame while zooming, median ms |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        for name, data in shown.items():
            page = Path(folder, "page.html")
            page.write_text(html(data), encoding="utf-8")
            with opened(browser, page) as found:
                events, frame_ms = found.ask(EVENTS), found.ask(FRAME_MS)
            size = page.stat().st_size / 1e6
            print(f"| {name} | {events:,} | {size:.2f} | {frame_ms:.0f} |")


if __name__ == "__main__":
    main(sys.argv[1:])
