"""Where `multiprocessing` keeps its sockets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ASK = """
import multiprocessing, multiprocessing.util, sys
from elastic_driver.worker.context import use_scratch

def ask(answers):
    answers.put(multiprocessing.util.get_temp_dir())

if __name__ == "__main__":
    use_scratch(sys.argv[1])
    print(multiprocessing.util.get_temp_dir())
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        answers = context.SimpleQueue()
        child = context.Process(target=ask, args=(answers,))
        child.start()
        print(answers.get())
        child.join(30)
"""


def test_this_process_and_its_children_use_the_agents_folder(tmp_path: Path) -> None:
    script = tmp_path / "ask.py"
    script.write_text(ASK)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == [str(tmp_path)] * 3
