"""What a run on one rank consists of: plan, env and learner, session, console output."""
