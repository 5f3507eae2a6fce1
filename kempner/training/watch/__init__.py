"""What a loop changes and no checkpoint would hold: held all the same, or told in one sentence."""
