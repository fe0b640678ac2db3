#!/bin/bash
# A run on a Ray cluster that is there already, by `ray job submit`.
#
#   RAY_HEAD=10.0.0.1 MODEL=/shared/Qwen2.5-7B SEARCH=http://10.0.0.9:8000/retrieve examples/ray/submit.sh
#
# The cluster was started with the environment of srl-search[verl] on every machine:
#
#   ray start --head --dashboard-host=0.0.0.0          # on the first
#   ray start --address=10.0.0.1:6379                  # on each other
#
# WORKSPACE, MODEL and the questions lie on a file system that every machine sees. What the search servers
# ask for as a token comes from SRL_SEARCH_TOKEN, set where `ray start` is typed: Ray hands it to every process.

set -euo pipefail

RAY_HEAD=${RAY_HEAD:?give the address of the cluster, as in RAY_HEAD=10.0.0.1}
MODEL=${MODEL:?give the directory of a model, as in MODEL=/shared/Qwen2.5-7B}
SEARCH=${SEARCH:?give the URL of a search server, or several as [URL,URL]}
WORKSPACE=${WORKSPACE:-/shared/srl-workspace}
QUESTIONS=${QUESTIONS:-/shared/data/nq_hotpotqa_train}
NODES=${NODES:-1}

# The process that trains runs on the cluster: --no-wait leaves it there when this shell ends.
ray job submit --address="http://$RAY_HEAD:8265" --no-wait -- \
  srl --workspace "$WORKSPACE" train --backend verl --preset search-r1-v0.2 --algo grpo --model "$MODEL" \
  --set cluster.address=auto --set cluster.nnodes="$NODES" --set search.url="$SEARCH" \
  --set data.train_files="$QUESTIONS/train.parquet" --set data.val_files="$QUESTIONS/validation.parquet"

# How it goes can be seen from any machine that has the workspace, while it trains:
srl --workspace "$WORKSPACE" inspect runs
