"""Reports as pandas DataFrames, and the csv export that is made from them."""
