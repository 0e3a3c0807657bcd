"""MAY IT?  Policies, and the decision whether a policy allows an action. Pure: nothing here touches the machine."""
