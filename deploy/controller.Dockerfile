# docker build -f deploy/controller.Dockerfile -t harnessrl-controller:0.1.0 .
FROM python:3.12-slim AS build
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN python -m venv /venv && /venv/bin/pip install --no-cache-dir "/src[k8s]"

FROM python:3.12-slim
COPY --from=build /venv /venv
RUN useradd --uid 1000 harnessrl
USER 1000
WORKDIR /tmp
ENV HOME=/tmp PYTHONUNBUFFERED=1
ENTRYPOINT ["/venv/bin/harnessrl", "controller", "--runner", "kubernetes"]
