"""Parts of a run on one rank: plan, env and learner, session, console output."""
