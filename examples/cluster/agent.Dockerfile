# docker build -f examples/cluster/agent.Dockerfile -t harnessrl-calculator:0.1.0 examples/quickstart
FROM python:3.12-slim
RUN pip install --no-cache-dir openai && useradd --uid 1000 agent && install -d -o agent /work
COPY agent.py calculator.py reward.py /work/
WORKDIR /work
USER 1000
