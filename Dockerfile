# zerobench with CUDA; docs/how-to/container.md shows how to run it.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# The release decides the versions of the compiler and of Python.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes g++ git openssh-client python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1001 zerobench \
    && install --directory --owner=zerobench /opt/venv /src /zerobench /zerobench/results
USER 1001

ENV PATH=/opt/venv/bin:$PATH
RUN python3 -m venv /opt/venv

# on: an image without the CUDA module is an error.
ENV ZEROBENCH_CUDA=on
COPY --chown=zerobench . /src
WORKDIR /src
RUN pip install --no-cache-dir . && rm -rf build

# Results go to results/ in the working folder: mount a folder there.
WORKDIR /zerobench
ENTRYPOINT ["zerobench"]
CMD ["recipe", "run", "precision"]
