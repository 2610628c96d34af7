# A verifier image with the cache folder filled for one model. The build context is the model's directory, which is only
# mounted: the image contains no weights. OPTIONS: options of `specdec warm-up`, the same as the verifier will have.
#
#   docker build -f deploy/images/warmed.Dockerfile -t specdec-verifier:0.1.0-big \
#       --build-arg VERIFIER=specdec-verifier:0.1.0 --build-arg OPTIONS="--threads 8" /models/big
#
# Build it on a machine like those that will serve: cache entries are valid only on the same kind of CPU.
ARG VERIFIER=specdec-verifier:0.1.0
FROM ${VERIFIER}
ARG OPTIONS=
# OPTIONS must be split into words.
# hadolint ignore=SC2086
RUN --mount=type=bind,target=/model specdec warm-up --model /model ${OPTIONS}
