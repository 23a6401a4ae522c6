"""From records to a data frame, tables, pictures and pages."""
