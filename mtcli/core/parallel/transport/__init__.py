"""What carries collectives: process groups, or memory that ranks of a machine share."""
