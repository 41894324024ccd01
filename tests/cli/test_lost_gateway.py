import socket
import subprocess
import sys


def test_a_gateway_that_is_not_there_is_one_sentence() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        command = [sys.executable, "-m", "harnessrl", "rollouts", "ls", "--gateway", url]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: lost the gateway") and ended.stderr.count("\n") == 1
