/// Who speaks in a message.
public enum Role: Sendable, Hashable, RawRepresentable, Codable {
    case system, user, assistant, tool
    /// A role that this version of the package does not know.
    case other(String)

    public init(rawValue: String) {
        self = [Role.system, .user, .assistant, .tool].first { $0.rawValue == rawValue } ?? .other(rawValue)
    }

    public var rawValue: String {
        switch self {
        case .system: "system"
        case .user: "user"
        case .assistant: "assistant"
        case .tool: "tool"
        case .other(let name): name
        }
    }
}
