# docker build -f deploy/gateway.Dockerfile -t harnessrl-gateway:0.1.0 .
FROM python:3.12-slim AS build
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN python -m venv /venv && /venv/bin/pip install --no-cache-dir /src

FROM python:3.12-slim
COPY --from=build /venv /venv
RUN useradd --uid 1000 harnessrl && install -d -o harnessrl /data
USER 1000
WORKDIR /data
ENV HOME=/tmp PYTHONUNBUFFERED=1
EXPOSE 8080
ENTRYPOINT ["/venv/bin/harnessrl", "gateway"]
CMD ["--host", "0.0.0.0", "--store", "/data/harnessrl.db"]
