"""Account of a traced step: where its time goes."""
