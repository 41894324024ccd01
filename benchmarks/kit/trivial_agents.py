"""Agents that do next to nothing, with the standard library only."""

import json
import os
import time
import urllib.request


class Rewarder:
    def run(self) -> None:
        body = json.dumps({"event_type": "reward", "data": {"value": 1.0}}).encode()
        headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["AGL_KEY"]}
        request = urllib.request.Request(os.environ["AGL_EVENT_URL"], body, headers)
        urllib.request.urlopen(request, timeout=60).read()


class Sleeper(Rewarder):
    def run(self) -> None:
        time.sleep(float(os.environ["SECONDS"]))
        super().run()
