"""Processes that a test starts and waits for."""

import faulthandler
import multiprocessing
import time

# Most of a test whose processes go through many cases, on a busy machine.
SECONDS = 400


def starter():
    """Starts processes as copies of one that has imported PyTorch, which takes it seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "fusestep.torch"])
    return context


def tell_if_late():
    """Lets this process write where its threads stand, shortly before it is ended."""
    faulthandler.dump_traceback_later(SECONDS - 20)


def run_all(target, arguments, folder):
    """Runs the target with each of the arguments, in a process each; the ended processes.

    Late ones are killed. Their texts, `rank*.txt` in the folder, are in the error.
    """
    processes = [starter().Process(target=target, args=each) for each in arguments]
    for process in processes:
        process.start()
    end = time.monotonic() + SECONDS
    for process in processes:
        process.join(max(0, end - time.monotonic()))
    late = [rank for rank, process in enumerate(processes) if process.exitcode is None]
    for rank in late:
        processes[rank].kill()
    if late:
        texts = [path.read_text() for path in sorted(folder.glob("rank*.txt"))]
        raise AssertionError(f"processes {late} did not end\n" + "\n".join(texts))
    return processes
