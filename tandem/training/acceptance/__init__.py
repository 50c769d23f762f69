"""What a draft is worth to a target, measured before anyone deploys the pair."""
