# A verifier's image whose cache folder is filled for one model. The model's directory is what it is built from, and is
# mounted only: no weights come into the image. OPTIONS are those of `specdec warm-up`, as the verifier will have them.
#
#   docker build -f deploy/images/warmed.Dockerfile -t specdec-verifier:0.1.0-big \
#       --build-arg VERIFIER=specdec-verifier:0.1.0 --build-arg OPTIONS="--threads 8" /models/big
#
# Build it on a machine like those that will serve: what is kept is found on the same kind of processor alone.
ARG VERIFIER=specdec-verifier:0.1.0
FROM ${VERIFIER}
ARG OPTIONS=
# Options are several words.
# hadolint ignore=SC2086
RUN --mount=type=bind,target=/model specdec warm-up --model /model ${OPTIONS}
