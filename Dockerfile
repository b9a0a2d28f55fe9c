# Image of Paceline, whose entry point is the command paceline.
#
#   docker build --tag paceline .
#   docker build --tag paceline:cpu --build-arg VARIANT=cpu --build-arg TORCH_INDEX=URL .
#
# Arguments:
#   VARIANT      cuda or cpu. The CUDA libraries are part of torch's packages; the host has the driver only.
#   BASE         image with Debian 12.
#   TORCH_INDEX  package index from which torch is installed, for example PyTorch's index of CPU builds. By default
#                torch comes from pip's index, whose builds have CUDA.
#   EXTRAS       optional dependencies of pyproject.toml that are installed.
#
# The secret pip.conf, if it is given, is pip's configuration during the build.
ARG BASE=debian:bookworm-slim
FROM ${BASE}

ARG VARIANT=cuda
# Mesa's EGL renders videos where there is no GPU. Triton compiles kernels with gcc and Python's headers.
RUN case "$VARIANT" in \
      cuda) compiler="gcc libc6-dev python3-dev" ;; \
      cpu) compiler="" ;; \
      *) echo "VARIANT=$VARIANT must be cuda or cpu" >&2; exit 1 ;; \
    esac && \
    apt-get update && \
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      ca-certificates python3-venv libegl1 libegl-mesa0 libgl1-mesa-dri libopengl0 $compiler && \
    rm -rf /var/lib/apt/lists/* && \
    python3 -m venv /opt/paceline
ENV PATH=/opt/paceline/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# The dependencies are a layer without the source, so that a change of the source does not install them again.
WORKDIR /opt/source
COPY requirements.lock ./
ARG TORCH_INDEX=""
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    pip install --constraint requirements.lock ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
COPY pyproject.toml ./
ARG EXTRAS="s3 onnx"
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    if [ "$VARIANT" = cuda ]; then gpu=gpu; fi && \
    python -c 'import sys, tomllib; \
project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
extras = project["optional-dependencies"]; \
print(*project["dependencies"], *(line for name in sys.argv[1:] for line in extras[name]), sep="\n")' \
      $EXTRAS $gpu >requirements.txt && \
    pip install --constraint requirements.lock --requirement requirements.txt
COPY README.md LICENSE ./
COPY src src
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    pip install --no-deps . && rm -rf build

# Any user ID can run the image: the home directory, which holds caches, is writable for all.
RUN useradd --uid 1000 --create-home paceline && chmod 0777 /home/paceline
ENV HOME=/home/paceline LOGNAME=paceline NVIDIA_DRIVER_CAPABILITIES=compute,utility,graphics PYTHONUNBUFFERED=1
USER 1000:1000
WORKDIR /home/paceline
ENTRYPOINT ["paceline"]
CMD ["--help"]
