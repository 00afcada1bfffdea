"""Nothing of Triton's tools is needed; torch asks whether tensor descriptors exist, and here they
do not."""
