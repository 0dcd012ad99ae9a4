"""What the tests hold Soapstone against."""
