"""From records to tables, pictures, pages and verdicts."""
