"""State of a job under any layout: boxes, the plan that moves them, and the stream that does."""
