"""Documents as terminal tables, markdown and a page; results as JSON, csv and a trace."""
