#!/bin/bash
# Runs on a machine outside of the pod: bash tpu_pod.sh NAME ZONE

NAME=$1
ZONE=$2
RESTARTS=3
HOURS=4 # after which a run that has not ended counts as hung
RUN=/mnt/shared/runs/one # all hosts must see it

everywhere() {
  gcloud compute tpus tpu-vm ssh "$NAME" --zone="$ZONE" --worker=all --command="$1"
}

for ((number = 0; number <= RESTARTS; number++)); do
  # SIGTERM: the processes save and leave; SIGKILL two minutes later, for one that hangs.
  everywhere "timeout --kill-after=120 ${HOURS}h \
    python3 -m experiments.train --run=mesh --coordinator_address=auto --workers=16 \
    --checkpoint_every=500 --output_dir=$RUN" \
    && exit 0
  echo "attempt $number failed; restarts: $RESTARTS" >&2
  # What is left on other hosts holds the chips and waits for who is gone.
  everywhere "pkill --signal KILL --full '[e]xperiments.train'; true"
done
exit 1
