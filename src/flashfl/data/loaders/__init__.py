"""One file for each kind of data set. Each ends with what is known of the data sets it reads."""
