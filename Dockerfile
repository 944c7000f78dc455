# Images of headway, one target each (docs/operations.md has flags and variables):
#   docker build --target server-cpu --tag headway-server .
#   docker build --target server-gpu --tag headway-server-gpu .
#   docker build --target client     --tag headway-client .
#
# Base: python:*-slim in both stages, because a virtual environment points at its interpreter by path and the wheels of
# ONNX Runtime, NumPy and gRPC need glibc. A distroless image would pin Debian's own Python; an nvidia/cuda image would
# bring a second copy of libraries that the wheels of the gpu extra bring at the versions ONNX Runtime was built for.
ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim AS builder
ENV PIP_CACHE_DIR=/var/cache/pip
WORKDIR /src
COPY constraints.txt LICENSE ./
COPY docker/ docker/
COPY proto/ proto/

FROM builder AS server-cpu-builder
COPY server/ server/
RUN --mount=type=cache,target=/var/cache/pip bash docker/make-environment.sh server-cpu /headway

FROM builder AS server-gpu-builder
COPY server/ server/
RUN --mount=type=cache,target=/var/cache/pip bash docker/make-environment.sh server-gpu /headway

FROM builder AS client-builder
COPY client/ client/
RUN --mount=type=cache,target=/var/cache/pip bash docker/make-environment.sh client /headway

FROM python:${PYTHON_VERSION}-slim AS runtime
# Bytecode was compiled with the environment; the root file system may be read-only. Without the third line ONNX
# Runtime reports its use to its maker.
ENV PATH=/headway/bin:$PATH \
    HOME=/nonexistent \
    ORT_DISABLE_TELEMETRY=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
# A fixed id, so that the rights of mounted folders can be set before the container runs. It has no line in /etc/passwd:
# nothing asks for its name, and a layer with the day's date in /etc/shadow would differ from build to build.
USER 10001:10001

FROM runtime AS server
# Settings, not arguments: what is given after the image's name adds to them. The health check reads the port too.
ENV HEADWAY_STORE=/models \
    HEADWAY_HOST=0.0.0.0 \
    HEADWAY_PORT=50051
EXPOSE 50051
# The server drains on this signal: it refuses new calls and finishes those it has.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --start-interval=1s --retries=3 \
    CMD ["python", "-I", "/headway/health_probe.py"]
ENTRYPOINT ["headway-server"]

FROM server AS server-gpu
# A container without a GPU is told so at start, rather than served from the CPU. The NVIDIA container toolkit mounts
# the driver's compute libraries and nvidia-smi.
ENV HEADWAY_DEVICE=cuda \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=server-gpu-builder /headway /headway

FROM runtime AS client
COPY --from=client-builder /headway /headway
ENTRYPOINT ["headway"]
CMD ["--help"]

# The last stage is what `docker build .` makes.
FROM server AS server-cpu
COPY --from=server-cpu-builder /headway /headway
