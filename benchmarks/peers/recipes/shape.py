"""The size of the task: 96 numbered samples in three epochs of 12 steps."""

SAMPLES, EPOCHS, GLOBAL_BATCH, BATCH = 96, 3, 8, 2
PER_EPOCH = SAMPLES // GLOBAL_BATCH
STEPS = EPOCHS * PER_EPOCH
SAVE_EVERY, EVALUATE_EVERY = 5, 6
