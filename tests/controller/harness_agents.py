"""Agents that the controller's tests run: standard library only."""

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

AT_IMPORT = os.environ.get("AGL_EVENT_URL")


def reward(value: float = 1.0, **more: object) -> None:
    body = json.dumps({"event_type": "reward", "data": {"value": value, **more}}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["AGL_KEY"]}
    urllib.request.urlopen(urllib.request.Request(os.environ["AGL_EVENT_URL"], body, headers), timeout=60).read()


class Rewarder:
    def run(self) -> None:
        reward(pid=os.getpid(), question=os.environ.get("QUESTION"), own_environment=AT_IMPORT)


class Asynchronous:
    async def run(self) -> None:
        await asyncio.sleep(0)
        reward()


class Sleeper:
    def run(self) -> None:
        time.sleep(float(os.environ.get("SECONDS", "60")))
        reward()


class Raiser:
    def run(self) -> None:
        print("about to fail")
        raise RuntimeError("broken on purpose")


class Spinner:
    def run(self) -> None:
        while True:
            pass


class Aborter:
    def run(self) -> None:
        os.abort()


class Daemonizer:
    """Leaves a process behind that has its own session, no terminal, and ignores TERM."""

    def run(self) -> None:
        program = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
        daemon = subprocess.Popen(
            [sys.executable, "-c", program], start_new_session=True, stdout=subprocess.PIPE, text=True
        )
        assert daemon.stdout is not None and daemon.stdout.readline() == "up\n"
        reward()


class Silent:
    def run(self) -> None:
        pass


class Caller:
    """Calls the model, whatever the answer."""

    def run(self) -> None:
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
        headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
        url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
        try:
            urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60).read()
        except urllib.error.HTTPError as error:
            print(error.code)
        reward()
