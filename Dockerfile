# The training job with all five packages; on Linux pip takes CUDA builds of torch unless an index of CPU wheels is given.
#
#   docker build -t fsdp-train --build-arg PIP_EXTRA_INDEX_URL=... .                      for CPUs
#   docker build -t fsdp-train --build-arg BASE=nvidia/cuda:13.0.1-base-ubuntu24.04 .     for GPUs
#   docker run --rm --shm-size 2g --volume "$PWD/runs:/home/trainer/runs" fsdp-train      add --gpus all for GPUs
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE}

# hadolint ignore=DL3008
RUN command -v python3 || (apt-get update && apt-get install -y --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*)
RUN python3 -m venv /opt/venv && useradd --create-home --uid 1100 trainer
ENV PATH=/opt/venv/bin:$PATH

ARG PIP_EXTRA_INDEX_URL
COPY constraints.txt requirements.txt /opt/fsdp/
COPY packages /opt/fsdp/packages
WORKDIR /opt/fsdp
RUN pip install --no-cache-dir --constraint constraints.txt -r requirements.txt

USER 1100
WORKDIR /home/trainer
CMD ["fsdp-train"]
