"""One run as processes: started, watched, sampled, judged and ended."""
