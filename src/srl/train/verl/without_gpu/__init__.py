"""verl on a machine without a GPU: a platform, a rollout server, patches and settings. Nothing imports it."""
